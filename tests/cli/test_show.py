"""``specattn generate --show``: tokens in the colours of who drafted them."""

import contextlib
import json
import os
import re
import sys
import threading

import pytest

from specattn.decoding import Round
from specattn.pages.authors import CORRECTED, OWN, Authors
from tests.cli.conftest import start

STYLE = re.compile(r"\x1b\[([\d;]*)m")


@pytest.fixture
def on_terminal(monkeypatch, capfd):
    """Run the command with a terminal for standard output; return what came there, and errors."""

    def run(*arguments, **environment):
        for name, value in {"TERM": "xterm-256color", **environment}.items():
            monkeypatch.setenv(name, value)
        ours, theirs = os.openpty()
        read = []

        def drain():
            with contextlib.suppress(OSError):  # the other end is closed
                while chunk := os.read(ours, 4096):
                    read.append(chunk)

        reader = threading.Thread(target=drain)
        reader.start()
        with open(theirs, "w", encoding="utf-8") as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert not start(monkeypatch, *arguments)
        reader.join()
        os.close(ours)
        return b"".join(read).decode().replace("\r\n", "\n"), capfd.readouterr().err

    return run


def options(prompt, method, *more):
    return ("generate", "--prompt-file", prompt, "--method", method, "--max-new-tokens", 24, *more)


@pytest.mark.parametrize("method", ["plain", "prompt_lookup:gamma=4", "vegas:gamma=2", "auto"])
def test_every_accepted_token_has_a_colour(specattn, on_terminal, prompt, tmp_path, method):
    out = tmp_path / "out.json"
    shown, said = on_terminal(*options(prompt, method, "--show", "--json", out))
    written = json.loads(out.read_text())
    assert STYLE.sub("", shown) == written["text"] + "\n"
    figures = written["statistics"]
    coloured = [code for code in STYLE.findall(shown) if code in ("32", "35", "36")]
    drafted = figures["accepted"] - figures["discarded"]
    # A line's end has no colour that could be seen.
    assert drafted - shown.count("\n") <= len(coloured) <= drafted
    counts = re.findall(r"^ *(\d+) +\d+%  drafted by", said, re.MULTILINE)  # auto may have two
    assert sum(map(int, counts)) == drafted
    if method.startswith("prompt_lookup"):
        assert coloured, "the prompt repeats itself"
        assert "drafted by prompt_lookup" in said
    if method == "plain":
        assert "    24 100%  the target's, where no draft went that far" in said


def test_no_color_is_heeded(on_terminal, prompt):
    shown, _ = on_terminal(*options(prompt, "prompt_lookup:gamma=4", "--show"), NO_COLOR="1")
    assert set(STYLE.findall(shown)) <= {"", "0", "4"}, "at most underlined"


def test_a_pipe_gets_the_text_alone(specattn, prompt):
    _, plain, _ = specattn(*options(prompt, "suffix"))
    code, shown, said = specattn(*options(prompt, "suffix", "--show"))
    assert (code, shown) == (0, plain)
    assert "drafted by suffix" in said
    assert "\x1b[" not in said


def test_the_texts_of_a_batch_have_colours_too(specattn, on_terminal, prompt, tmp_path):
    other = tmp_path / "other.py"
    other.write_text("import os\n\n\nprint(os.getcwd())\n" * 20)
    arguments = options(prompt, "prompt_lookup:gamma=4", "--prompt-file", other)
    _, plain, _ = specattn(*arguments)
    shown, _ = on_terminal(*arguments, "--show")
    assert STYLE.sub("", shown) == plain
    assert "35" in STYLE.findall(shown)


def test_what_an_earlier_run_made_is_told_apart(specattn, prompt, tmp_path):
    state = tmp_path / "run.safetensors"
    specattn(*options(prompt, "suffix", "--state", state))
    _, _, said = specattn(
        "generate", "--prompt-file", prompt, "--resume", state, "--max-new-tokens", 30, "--show"
    )
    assert "    24  80%  of the run before" in said


def test_who_is_named():
    authors = Authors("quest")
    assert authors.of_round(Round(3, 3, 2, [1, 2, 3])) == ["quest", "quest", CORRECTED]
    assert authors.of_round(Round(3, 3, 3, [1, 2, 3, 4], "suffix")) == [*["suffix"] * 3, OWN]
    assert authors.of_round(Round(0, 0, 0, [1])) == [OWN]
    styles = [authors.style(name) for name in ("suffix", "vegas", "quest", "medusa")]
    assert len(set(styles)) == 4
    assert [authors.style(name) for name in ("medusa", "quest")] == styles[:1:-1]
