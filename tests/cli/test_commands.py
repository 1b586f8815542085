"""The commands together: how they are started, and what starting them costs."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

import specattn as package
from specattn.cli.options import DTYPES
from specattn.decoding import METHODS, parse_method


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_torchrun_can_start_the_module():
    assert "medusa" in python("-m", "specattn.cli", "train", "--help")


@pytest.mark.parametrize(
    "command", ["-h", "--version", "env", "plan", "generate --help", "train longspec -h"]
)
def test_what_decodes_nothing_imports_no_transformers(command):
    """Importing it takes seconds."""
    code = (
        f"import sys\nfrom specattn.cli import main\nsys.argv += {command.split()}\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    print(stop.code)\n"
        "print('transformers' in sys.modules)"
    )
    assert python("-c", code).splitlines()[-2:] == ["0", "False"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_is_one_line(number, tmp_path):
    """Before anything is loaded; `torch` here is a module that never ends."""
    (tmp_path / "torch.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    code = "import sys; sys.argv = ['specattn']; from specattn_command import main; main()"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (128 + number, "specattn: interrupted\n")


@pytest.mark.parametrize("missing", ["typer", "transformers", "rich"])
def test_what_is_not_installed_is_named(missing, prompt):
    """As after an installation without extras."""
    code = (
        f"import sys; sys.modules['{missing}'] = None\n"
        f"sys.argv = ['specattn', 'generate', '--prompt-file', '{prompt}']\n"
        "from specattn_command import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"needs {missing}: pip install 'specattn[cli]'" in done.stderr


def test_version(specattn):
    assert specattn("--version")[:2] == (0, f"specattn {package.__version__}\n")


def test_the_list_of_methods_can_be_given_back(specattn):
    code, text, _ = specattn("methods")
    assert code == 0
    found = dict(re.findall(r"^(\w+)\n((?:  .*\n)*)", text, re.MULTILINE))
    assert [*found] == [*METHODS]
    for name, lines in found.items():
        options = ",".join(line.split()[0] for line in lines.splitlines())
        read, given = parse_method(f"{name}:{options}" if options else name)
        assert METHODS[read](**given) == METHODS[name]()
    assert specattn("methods", "vegas")[1].startswith("vegas\n  gamma=none ")
    code, _, error = specattn("methods", "magic")
    assert code == 2
    assert "got 'magic'" in error


@pytest.mark.parametrize("name", [*DTYPES, *DTYPES.values()])
def test_a_dtype_has_a_short_and_a_long_name(specattn, prompt, tmp_path, name):
    out = tmp_path / "out.json"
    given = ("generate", "--prompt-file", prompt, "--max-new-tokens", 1, "--dtype", name)
    assert specattn(*given, "--json", out)[0] == 0
    assert json.loads(out.read_text())["model"]["dtype"] == DTYPES.get(name, name)
    assert specattn("plan", "--dtype", name)[0] == 0


def test_a_reader_may_go(prompt):
    """As of ``specattn generate ... | head -c 1``."""
    code = "from specattn.cli import main; main()"
    arguments = ["generate", "--prompt-file", prompt, "--max-new-tokens", "60"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        said = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 0
    assert "Error" not in said
