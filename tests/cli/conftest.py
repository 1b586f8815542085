"""The command as a user starts it."""

import copy
import json
import sys
from functools import cache
from pathlib import Path

import pytest
import typer.main

from specattn import cli
from specattn.cli import terminal

TINY = Path(__file__).parents[2] / "examples" / "tiny"
GET_COMMAND = typer.main.get_command


@cache
def tiny(dtype):
    """Return the embedded target, loaded and proved once in a process."""
    from specattn.decoding import generate
    from specattn.decoding.model.checkpoint import load_causal_model

    model = load_causal_model(TINY, dtype)
    generate(model, [[1]], "plain", max_new_tokens=1)
    return model


def start(patch, *arguments):
    """Run the command with the embedded target that is loaded already; return the exit code."""
    from specattn.cli import loading
    from specattn.decoding.model.model import Model
    from specattn.decoding.model.structure import structure_of

    load, read = loading.load_causal_model, loading.load_tokenizer

    def load_once(folder, dtype, device="cpu", **options):
        if folder != TINY or str(device) != "cpu" or options != {"tensor_parallel": 1}:
            return load(folder, dtype, device, **options)
        weights = [*tiny(dtype).parameters(), *tiny(dtype).buffers()]
        # Another model of the same weights: of what one run measured the next one knows nothing.
        model = copy.deepcopy(tiny(dtype), {id(one): one for one in weights})
        proved, copied = structure_of(tiny(dtype)), structure_of(model)
        for kind in tuple(Model.of(tiny(dtype))._known):
            match kind:
                case ("proved" | "replayed" as proof, proved.number, *where):
                    Model.of(model).recall((proof, copied.number, *where), lambda: True)
        return model

    with patch.context() as inner:
        if load is not None:
            inner.setattr(loading, "load_causal_model", load_once)
            inner.setattr(loading, "load_tokenizer", cache(read))
        inner.setattr(typer.main, "get_command", command)
        inner.setattr(sys, "argv", ["specattn", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    return stop.value.code


@cache
def command(app):
    """Return what an app is parsed by, made once in a process."""
    return GET_COMMAND(app)


@pytest.fixture(autouse=True)
def _proofs(monkeypatch, tmp_path_factory):
    """Keep what was found of models in other folders."""
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path_factory.getbasetemp() / "proofs"))


@pytest.fixture
def specattn(monkeypatch, capfd):
    """Run the command; return exit code, standard output and standard error."""
    return lambda *arguments: (start(monkeypatch, *arguments), *capfd.readouterr())


@pytest.fixture
def columns(monkeypatch, specattn):
    """Let a stream be a terminal of so many columns."""

    def let(stream, width):
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
        monkeypatch.setattr(terminal.console, "_width", width)

    return let


@pytest.fixture
def refused(specattn):
    """Run the command, which says in one line why it does not, `noted` lines before it apart."""

    def run(reason, *arguments, noted=0):
        code, text, said = specattn(*arguments)
        assert (code, text) == (2, "")
        *notes, line = said.splitlines()
        assert len(notes) <= noted
        assert line.startswith("specattn: error: ")
        assert reason in line

    return run


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.py"
    path.write_text("def add(left, right):\n    return left + right\n\n\n" * 12)
    return path


@pytest.fixture
def written(specattn, prompt, tmp_path):
    """Run a command that continues the prompt; return what it writes, and what it prints."""

    def run(command, *arguments):
        out = tmp_path / "out.json"
        code, text, said = specattn(command, "--prompt-file", prompt, *arguments, "--json", out)
        assert code == 0, said
        return json.loads(out.read_text()), text, said

    return run


@pytest.fixture(scope="session")
def drafter(tmp_path_factory):
    """Return a folder with an untrained drafter for the embedded target."""
    from specattn.drafters import LongSpecDrafter

    folder = tmp_path_factory.mktemp("trained") / "drafter"
    LongSpecDrafter.for_target(tiny("auto"), target="tiny").save_pretrained(folder)
    return folder
