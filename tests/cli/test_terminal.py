"""What reaches a terminal: no sequence that somebody else has written; and bars, nothing else."""

import ast
import io
import logging
import os
import re
import subprocess
import sys
import warnings
from itertools import cycle, islice
from pathlib import Path

import pytest

from specattn import cli
from specattn.cli import terminal
from specattn.escaping import escaped
from tests.cli.test_show import on_terminal  # noqa: F401

TITLE = "\x1b]0;pwned\x07"  # sets the title of a terminal's window
SHOWN = r"\x1b]0;pwned\x07"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 漢 \u200f", "a\tb\nc é 漢 \u200f"),
        (TITLE, SHOWN),
        ("over\rwritten\b\x00\x7f", r"over\rwritten\x08\x00\x7f"),
        ("\x9b31m \u202eabc\u2066", r"\x9b31m \u202eabc\u2066"),
        ("\udcff", r"\udcff"),  # a byte of a file's name that is not UTF-8
    ],
)
def test_what_is_escaped(text, shown):
    assert escaped(text) == shown
    assert "".join(map(escaped, text)) == shown  # in whatever pieces a stream brings it
    shown.encode()


@pytest.fixture
def steering_prompt(tmp_path):
    path = tmp_path / f"[bold]{TITLE}:bomb:.txt"
    path.write_text("import os\n" * 40)
    return path


def test_a_text_is_escaped_on_a_terminal_and_raw_elsewhere(
    specattn,
    on_terminal,  # noqa: F811
    monkeypatch,
    prompt,
):
    """Although every token brings a part of a sequence alone."""
    arguments = ("generate", "--prompt-file", prompt, "--max-new-tokens", 10)
    parts = ["\x1b", "]0;pwn", "ed\x07", "a\tb\r\n"]
    text = "".join(islice(cycle(parts), 10)) + "\n"
    seen = []
    for run in (specattn, on_terminal):
        for more in ((), ("--show",)):
            pieces = cycle(parts)
            monkeypatch.setattr(terminal.Pieces, "next", lambda *_, pieces=pieces: next(pieces))
            seen.append(run(*arguments, *more))
    assert [written for _, written, _ in seen[:2]] == [text, text]
    for shown, _ in seen[2:]:
        assert re.sub("\x1b\\[[\\d;]*m", "", shown) == escaped(text)


def test_names_of_files_are_escaped_in_messages(specattn, refused, steering_prompt, prompt):
    both = ("--prompt-file", steering_prompt, "--prompt-file", prompt, "--max-new-tokens", 4)
    for command in ("generate", "compare"):
        code, _, said = specattn(command, *both, "--last-tokens", 30)
        assert code == 0
        assert not STEERING.search(said)
        assert f"[bold]{SHOWN}:bomb:.txt" in said
    steering_prompt.write_text("")
    refused(f"{SHOWN}:bomb:.txt is empty", "generate", *both)
    refused(SHOWN, "generate", f"--{TITLE}")
    refused(SHOWN, "generate", *both[2:], "--model", steering_prompt.parent / TITLE)


def test_bars_and_waiting_lines_are_escaped(monkeypatch, tmp_path):
    seen = io.StringIO()
    console = type(terminal.console)(file=seen, force_terminal=True, width=200)
    monkeypatch.setattr(terminal, "console", console)
    with terminal.status(f"[bold]{TITLE}"):
        pass
    with terminal.progress_bars() as bars:
        bars.add_task(f"[bold]{TITLE}", total=1)
    console.rule(TITLE)
    assert TITLE not in seen.getvalue()
    assert seen.getvalue().count("\\x1b]0;p") >= 3
    assert seen.getvalue().count("[bold]") >= 2


def test_what_libraries_say_is_escaped(capsys):
    with terminal.libraries_escaped(), warnings.catch_warnings():
        warnings.simplefilter("always")
        assert SHOWN in warnings.formatwarning(TITLE, UserWarning, "file.py", 1)
        record = logging.getLogRecordFactory()("x", 40, "file.py", 1, "of %s", (TITLE,), None)
    assert record.getMessage() == f"of {SHOWN}"
    assert TITLE in warnings.formatwarning(TITLE, UserWarning, "file.py", 1)


def test_a_defect_is_told_escaped(specattn, monkeypatch):
    def fail():
        raise RuntimeError(TITLE)

    monkeypatch.setattr(cli.env, "facts", fail)
    code, _, said = specattn("env")
    assert code == 1
    assert said.startswith("Traceback")
    assert said.endswith(f"RuntimeError: {SHOWN}\n")


def test_nothing_of_the_command_writes_past_the_terminal():
    for path in Path(cli.__file__).parent.glob("*.py"):
        if path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "typer.echo", "typer.secho"), path.name
                assert not re.search(r"std(out|err)(\.buffer)?\.write", called), path.name


def test_a_redirected_text_stays_so_beside_bars(specattn, monkeypatch, prompt):
    """Where standard error is a terminal; its bars and waiting lines are not in the text."""
    seen = io.StringIO()
    console = type(terminal.console)(file=seen, force_terminal=True)
    arguments = ("generate", "--prompt-file", prompt, "--max-new-tokens", 12, "--method", "plain")
    _, expected, _ = specattn(*arguments)
    monkeypatch.setattr(terminal, "console", console)
    _, text, _ = specattn(*arguments)
    assert text == expected
    assert "reading the prompt" in seen.getvalue()


def test_no_bar_reaches_a_file():
    """Although some environments ask for colours everywhere."""
    code = (
        "import specattn_command\n"  # as of the program, which imports torch late
        "from types import SimpleNamespace\n"
        "from specattn.cli.terminal import say, status, streamed_text\n"
        "with status('waiting'):\n    pass\n"
        "tokenizer = SimpleNamespace(_tokenizer=None)\n"
        "with streamed_text(tokenizer, 2, 2, quiet=True) as (on_prefill, _):\n"
        "    on_prefill(1, 2)\n"
        "say('done')"
    )
    asked = os.environ | {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TERM": "xterm-256color"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=asked)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "done\n")
