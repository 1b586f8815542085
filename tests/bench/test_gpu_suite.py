"""The steps of the GPU suite, without a GPU: their commands are understood, and cover all."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import typer

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "bench" / "gpu_suite.sh"
sys.path.insert(0, str(SUITE.parent))

import run_decoding  # noqa: E402
import run_kernels  # noqa: E402
import train_and_resume  # noqa: E402
import winners  # noqa: E402
from studies import between_passes, body, prefill, study  # noqa: E402
from tests import HANGS  # noqa: E402

from specattn.cli import app  # noqa: E402
from specattn.decoding import METHODS  # noqa: E402

CUDA = torch.device("cuda")


@cache
def steps(*arguments):
    """Return what each step runs: the words behind the interpreter's."""
    outcome = subprocess.run(
        [str(SUITE), *arguments],
        env={**os.environ, "PYTHON": "python"},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=True,
    )
    # Bash quotes what has several lines as $'..', as nothing else reads it.
    found = [line.split(" ", 2) for line in outcome.stdout.splitlines()]
    return {name: [rest] if rest.startswith("-c") else shlex.split(rest) for name, _, rest in found}


COMMANDS = steps("--commands")


@pytest.fixture(autouse=True)
def _a_gpu_of_80_gb(monkeypatch):
    monkeypatch.setattr(run_kernels, "free_memory", lambda device: 80 << 30)


def of(script):
    """Return the steps of a script, and its arguments in each."""
    return {name: words[1:] for name, words in COMMANDS.items() if words[0] == script}


def test_every_step_has_a_command_and_none_runs(tmp_path, monkeypatch):
    listed = subprocess.run([str(SUITE), "--list"], capture_output=True, text=True, check=True)
    assert list(COMMANDS) == listed.stdout.split()
    assert list(steps("--commands", "body", "train")) == ["body", "train"]
    assert not (ROOT / "OUT").exists()
    known = ("bench/run_decoding.py", "bench/run_kernels.py", "bench/winners.py")
    known += (*STUDIES, "bench/train_and_resume.py")
    for name, words in COMMANDS.items():
        assert words[0] in known or words[0] == "-m" or name == "environment", name


def decoded(name):
    """Return the options of a step that decodes, and its groups."""
    options = run_decoding._parser().parse_args(of("bench/run_decoding.py")[name])
    run_decoding._complete(options)
    (section,) = run_decoding._sections(options)
    return options, section


@pytest.mark.parametrize("name", of("bench/run_decoding.py"))
def test_decoding(name):
    options, section = decoded(name)
    assert (options.device, options.texts, options.repeats) == ("cuda", 1, 1)
    assert options.resume
    assert options.json.name == f"{name}.jsonl"
    for group in section.groups:
        labels = [entry.label for entry in group.entries]
        assert len(set(labels)) == len(labels) >= 2
        assert all(entry.is_ours for entry in group.entries)


def methods(*names):
    return {entry.name for name in names for g in decoded(name)[1].groups for entry in g.entries}


def test_every_method_has_its_text_compared_in_float32():
    assert methods("texts", "texts-trained") == set(METHODS)
    for name in ("texts", "texts-trained"):
        options, section = decoded(name)
        assert options.model == run_decoding.EMBEDDED_TARGET
        assert options.dtype == "float32"
        assert [group.temperature for group in section.groups] == [0.0]


def test_every_method_decodes_a_model_of_real_size_greedily_sampled_and_in_batches():
    wide = [name for name in of("bench/run_decoding.py") if name.startswith("decode-")]
    found = {}
    for name in wide:
        options, section = decoded(name)
        assert str(options.model) == "build/wide/llama-3.1-8b"
        for group in section.groups:
            for entry in group.entries:
                found.setdefault((group.batch, group.temperature), set()).add(entry.name)
    assert found[1, 0.0] == set(METHODS)
    assert set(METHODS) - found[1, 1.0] == {"dflash", "jetflow"}
    assert len(found[8, 0.0]) >= 10


def test_steps_measure_what_drafts_of_4_bits_are_held_to():
    options, section = decoded("decode-codes")
    assert options.new_tokens >= 256  # from which on `auto` rounds
    assert {(g.context, g.temperature) for g in section.groups} == set(product([512, 4096], [0, 1]))
    options, section = decoded("decode-codes-32k")
    assert [group.batch for group in section.groups] == [1, 4]
    assert all("weights" in entry.options for g in section.groups for entry in g.entries[1:])


def test_the_passes_of_a_round_are_timed_one_by_one():
    options, section = decoded("passes")
    assert options.passes
    assert section.passes == 6
    assert [group.context for group in section.groups] == [32768]


def cases(name):
    """Return the rows that a step of the sweep would measure."""
    parser = run_kernels._parser()
    return run_kernels._cases(parser.parse_args(of("bench/run_kernels.py")[name]), CUDA, parser)


@pytest.mark.parametrize("name", of("bench/run_kernels.py"))
def test_kernels(name):
    assert cases(name)
    words = of("bench/run_kernels.py")[name]
    assert words[words.index("--device") + 1] == "cuda"


def test_chains_are_measured_in_every_cell():
    found = [
        (case.context, case.batch, case.rows)
        for name in COMMANDS
        if name.startswith("chains")
        for case in cases(name)
    ]
    contexts = [4096, 8192, 32768, 131072]
    assert sorted(found) == sorted(product(contexts, [1, 8], [1, 4, 8, 16, 32, 64]))


STUDIES = {
    "bench/studies/body.py": (body.Body, None),
    "bench/studies/prefill.py": (prefill.Prefill, None),
    "bench/studies/between_passes.py": (between_passes.BetweenPasses, 1),
}


@pytest.mark.parametrize("name", [name for name, words in COMMANDS.items() if words[0] in STUDIES])
def test_studies(name):
    script, *words = COMMANDS[name]
    kind, layers = STUDIES[script]
    options = study.parser_of(kind).parse_args(words)
    assert (options.device, options.shape, options.layers) == ("cuda", "llama-3.1-8b", layers)


@pytest.mark.parametrize("name", [name for name, x in COMMANDS.items() if "specattn.cli" in x])
def test_commands_of_the_package(name):
    command, *rest = COMMANDS[name][2:]
    typer.main.get_command(app).commands[command].make_context(command, rest)


@pytest.mark.parametrize("name", [name for name, words in COMMANDS.items() if "pytest" in words])
def test_tests(name):
    words = COMMANDS[name]
    path = ROOT / words[-1]
    assert path.is_file()
    whole = path.parts[-2] in ("triton_kernels", "ops", "backends")
    assert ("gpu" in words) != whole


def test_every_test_that_needs_a_gpu_has_a_step():
    mark = re.compile(r"^ *@?pytest\.mark\.gpu\b|marks=pytest\.mark\.gpu\b", re.MULTILINE)
    files = [path for path in ROOT.glob("tests/**/test_*.py") if mark.search(path.read_text())]
    marked = {path.relative_to(ROOT).as_posix() for path in files}
    assert len(marked) >= 7
    assert marked <= {words[-1] for words in COMMANDS.values()}


def test_winners_are_recorded_from_what_the_steps_before_left():
    files = COMMANDS["winners"][1:]
    assert files == [COMMANDS[f"kernels-{x}"][-1] for x in ("cuda", "triton")]
    with pytest.raises(SystemExit) as stop:
        winners.main([*files, "--no-such-option"])
    assert stop.value.code == 2


@pytest.mark.slow
def test_a_drafter_is_trained_and_the_run_resumed(tmp_path):
    """Of so few steps on so few tokens the loss need not fall: the verdict says whether it has."""
    out = tmp_path / "out"
    small = "--row-length 64 --batch-size 2 --per_device_train_batch_size 2 --anchors 4 --layers 1"
    status = train_and_resume.main(["--output", str(out), "--steps", "4", *small.split()])
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    losses = [one["loss"] for one in log if "loss" in one]
    assert len(losses) == 4
    assert status == int(losses[-1] >= losses[0])
    assert (out / "config.json").is_file()


def test_a_training_that_did_not_learn_or_lost_steps_fails(tmp_path, capsys):
    def history(*losses):
        log = [{"step": n + 1, "loss": loss} for n, loss in enumerate(losses) if loss]
        (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        return train_and_resume.verdict(tmp_path, 4)

    assert history(3.0, 2.5, 2.2, 2.0) == 0
    assert history(3.0, 2.5, 2.2, 3.1) == 1
    assert history(3.0, 2.5, None, 2.0) == 1
    assert "no loss of steps [3]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_and_resume.main(["--output", str(tmp_path), "--steps", "5"])
