"""``specattn generate --context-parallel`` under torchrun, and what it says where it cannot run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specattn import cli
from tests import HANGS
from tests.cli.conftest import prompt, specattn  # noqa: F401 - fixtures
from tests.distributed.ranks import forkserver


def under_torchrun(ranks, *arguments):
    """Run the command on ranks of one thread."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    command = ("-m", "specattn.cli", "generate", *map(str, arguments))
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(ranks), *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )


def as_torchrun_starts_it(rank, ranks, port, out, arguments):
    """Run the command as one of several ranks, in a process of its own."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    sys.argv, sys.stdout = ["specattn", *map(str, arguments)], out.open("w")
    cli.main()


def on_ranks(ranks, folder, *arguments):
    """Return what each rank prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    printed = [folder / f"rank-{rank}" for rank in range(ranks)]
    processes = [
        forkserver().Process(target=as_torchrun_starts_it, args=(rank, ranks, port, out, arguments))
        for rank, out in enumerate(printed)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANGS)
    assert [process.exitcode for process in processes] == [0] * ranks
    return [out.read_text() for out in printed]


def test_two_ranks_go_on_with_the_text_of_one(specattn, prompt, tmp_path):  # noqa: F811
    """The first rank alone writes; a run that one rank has saved is continued by two."""
    common = ("--prompt-file", prompt, "--method", "vegas")
    state, whole, out = (tmp_path / name for name in ("state", "whole.json", "out.json"))
    assert specattn("generate", *common, "--max-new-tokens", 24, "--json", whole)[0] == 0
    assert specattn("generate", *common, "--max-new-tokens", 9, "--state", state)[0] == 0
    options = ("--max-new-tokens", 24, "--resume", state, "--json", out, "--context-parallel", 2)
    printed = on_ranks(2, tmp_path, "generate", *common, *options)
    expected, found = (json.loads(path.read_text()) for path in (whole, out))
    assert found["tokens"] == expected["tokens"]
    assert (found["ranks"], found["resumed_at"]) == (2, 9)
    assert printed == [expected["text"] + "\n", ""]


def test_without_torchrun_it_says_how(specattn, prompt, monkeypatch):  # noqa: F811
    monkeypatch.delenv("RANK", raising=False)
    code, _, error = specattn("generate", "--prompt-file", prompt, "--context-parallel", 2)
    assert code == 2
    assert "torchrun --nproc-per-node 2 -m specattn.cli" in error
    assert error.count("\n") == 1


def test_another_number_of_ranks_is_refused(specattn, prompt, monkeypatch):  # noqa: F811
    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
    for name, value in {**started, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, _, error = specattn("generate", "--prompt-file", prompt, "--context-parallel", 2)
    assert code == 2
    assert "expected 2 ranks, but torchrun has started 4" in error


@pytest.mark.parametrize(
    "command", [("compare", "--prompt-file"), ("tune", "vegas", "--output", "x.json", "--prompts")]
)
def test_what_is_for_one_rank_says_so(specattn, prompt, monkeypatch, command):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, error = specattn(*command, prompt)
    assert code == 2
    assert "is for one rank, but torchrun has started 2" in error


@pytest.mark.slow
def test_parts_of_a_model_say_what_one_rank_says(specattn, prompt, tmp_path):  # noqa: F811
    common = ("--prompt-file", prompt, "--method", "vegas", "--max-new-tokens", 24)
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    assert specattn("generate", *common, "--json", whole)[0] == 0
    done = under_torchrun(2, *common, "--json", out, "--tensor-parallel", 2)
    assert done.returncode == 0, done.stderr
    expected, found = (json.loads(path.read_text()) for path in (whole, out))
    assert (found["tokens"], found["ranks"]) == (expected["tokens"], 2)
    assert done.stdout == expected["text"] + "\n"


@pytest.mark.slow
def test_ranks_of_other_prompts_are_named(prompt, tmp_path):  # noqa: F811
    """Each rank reads a file of its own."""
    other = tmp_path / "1.txt"
    (tmp_path / "0.txt").write_text("one = 1\n" * 9)
    other.write_text("two = 2\n" * 9)
    script = tmp_path / "launch.sh"
    script.write_text(
        f"exec {sys.executable} -m specattn.cli generate --context-parallel 2 "
        f"--prompt-file {tmp_path}/$RANK.txt --max-new-tokens 4\n"
    )
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python")
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "bash", str(script)],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode != 0
    assert "rank 1 has prompts of checksum" in done.stderr


@pytest.mark.slow
def test_the_example_runs_on_two_ranks():
    example = Path(__file__).parents[2] / "examples" / "context_parallel.py"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(example)],
        check=True,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    *_, sent, equal = done.stdout.splitlines()
    assert sent.startswith("2 ranks, ")
    assert equal == "equals the text of one rank: True"
