"""The commands together: how they are started, and what starting them costs."""

import subprocess
import sys

import pytest


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_torchrun_can_start_the_module():
    assert "medusa" in python("-m", "specattn.cli", "train", "--help")


@pytest.mark.parametrize("command", ["--help", "env", "plan", "generate --help", "train --help"])
def test_what_decodes_nothing_imports_no_transformers(command):
    """Importing it takes seconds."""
    code = (
        f"import sys\nfrom specattn.cli import main\nsys.argv += {command.split()}\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    print(stop.code)\n"
        "print('transformers' in sys.modules)"
    )
    assert python("-c", code).splitlines()[-2:] == ["0", "False"]
