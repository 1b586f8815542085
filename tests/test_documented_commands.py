"""Commands that the documentation shows exist, with their options; those that take seconds run."""

import re
import shlex
from dataclasses import fields

import pytest
import typer
from transformers import TrainingArguments
from typer.testing import CliRunner

from specattn.cli import app
from specattn.decoding.methods import parse_method
from tests.pages import PAGES, ROOT

STARTS = ("specattn ", "make ", "python ", "torchrun ", "bench/gpu_suite.sh", "$ specattn ")
RUN = ("plan", "methods", "env", "--version")


def _commands():
    """Return every command line of a code block, without its comment."""
    found = {}
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s#.*", "", line.strip())
                if line.startswith(STARTS) and ": error: " not in line:
                    found.setdefault(line.removeprefix("$ "), page.relative_to(ROOT).as_posix())
    return [pytest.param(line, id=f"{page}: {line[:50]}") for line, page in sorted(found.items())]


COMMANDS = _commands()


def _options(line):
    line = re.sub(r"\$\(.*?\)", "", line)  # of another program
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", line.split(" | ")[0]))


def _command(words):
    """Return a command of ours, and what follows its name."""
    command = typer.main.get_command(app)
    while words and getattr(command, "commands", None) and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def _check_ours(line, words):
    command, rest = _command(words)
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    known |= {"-h", "--help"}
    if words[0] == "train":  # the rest is the trainer's
        known |= {f"--{field.name}" for field in fields(TrainingArguments)}
    assert _options(" ".join(rest)) <= known
    for name in re.findall(r"--method '?([a-z]\w*(?::[^ ']+)?)'?(?= |$)", line):
        parse_method(name.replace("~/drafter", "drafter"))


def _check_script(path, line):
    texts = [ROOT / path, *ROOT.glob("bench/**/*.py"), *(ROOT / path).parent.glob("*.py")]
    source = "".join(text.read_text() for text in texts)
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", source))
    assert _options(line.split(path, 1)[1]) <= known


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_and_its_options_exist(line):
    words = shlex.split(line.replace("|", " "))
    if words[0] == "make":
        targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        wanted = re.findall(r"make ([a-z][\w-]*)", line)
        assert set(wanted) <= set(targets)
    elif words[0] == "specattn":
        _check_ours(line, words[1:])
    elif "specattn.cli" in words:
        _check_ours(line, words[words.index("specattn.cli") + 1 :])
    elif (script := next((w for w in words if w.endswith((".py", ".sh"))), None)) is not None:
        _check_script(script, line)
    else:
        assert words[:2] == ["python", "-m"], f"nothing checks {line!r}"


@pytest.mark.parametrize(
    "line",
    [
        one
        for one in COMMANDS
        if one.values[0].split()[1] in RUN and not set("[|") & set(*one.values)
    ],
)
def test_those_that_take_seconds_run(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert result.output.strip()


def test_something_is_found():
    lines = " ".join(one.values[0] for one in COMMANDS)
    assert all(f"specattn {name}" in lines for name in ("generate", "compare", "demo", "train"))
    assert len(COMMANDS) > 60
