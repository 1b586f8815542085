"""The command as a user starts it."""

import sys
from pathlib import Path

import pytest

from specattn import cli

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture
def specattn(monkeypatch, capfd):
    """Run the command; return exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["specattn", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.py"
    path.write_text("def add(left, right):\n    return left + right\n\n\n" * 12)
    return path


@pytest.fixture
def drafter(tmp_path):
    """Return a folder with an untrained drafter for the embedded target."""
    from transformers import AutoModelForCausalLM, logging

    from specattn.drafters import LongSpecDrafter

    logging.disable_progress_bar()  # the command does so too, but may not have run in this process
    target = AutoModelForCausalLM.from_pretrained(TINY, dtype="auto")
    LongSpecDrafter.for_target(target, target="tiny").save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"
