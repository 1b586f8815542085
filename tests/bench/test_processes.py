"""Commands of the benchmarks that start processes: the GPU suite, and ranks side by side."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).resolve().parents[2] / "bench" / "gpu_suite.sh"
sys.path.insert(0, str(SUITE.parent))

import run_distributed  # noqa: E402
from tests import HANGS  # noqa: E402


@pytest.mark.slow
def test_it_runs_small_from_a_plain_checkout(tmp_path):
    outcome = _suite("--out", str(tmp_path / "out"), "--smoke")
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert summary.count("passed") == 9
    run, *decoded = _lines(tmp_path / "out" / "decode-tiny.jsonl")
    assert run["kind"] == "run"
    assert run["model"]["weights"] == "random"
    assert [one["kind"] for one in decoded] == ["row"] * 3 + ["pass"] * 10
    assert all(one["acceptance"].startswith("SIMULATED ACCEPTANCE") for one in decoded)
    assert all(one["time"]["median"] > 0 and one["bytes"] > 0 for one in decoded[3:])
    assert (tmp_path / "out" / "decode-tiny" / "speed.png").stat().st_size > 0
    run, *rows = _lines(tmp_path / "out" / "kernels.jsonl")
    assert run["kind"] == "run"
    assert rows
    assert not any(row["fault"] for row in rows)
    table = json.loads((tmp_path / "out" / "cache" / "gpus.json").read_text())
    assert {row["winner"] for rows in table["fastest"].values() for row in rows} <= {
        "cpu",
        "reference",
    }
    assert all(
        row["seconds"].keys() == {"cpu", "reference"}
        for rows in table["fastest"].values()
        for row in rows
    )


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_a_command_of_its_own_and_keeps_what_others_left(tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        outcome = _suite("--out", str(out), "--smoke", "environment")
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        (out / "summary.txt").open("a").write("kernels of another call\n")
    lines = (out / "summary.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["kernels", "environment", "kernels"]
    assert "backends {" in outcome.stdout


def test_steps_are_listed_and_none_takes_more_than_90_seconds():
    names = _suite("--list").stdout.split()
    limits = re.findall(r"step ([\w.$\"-]+) (\d+) ", SUITE.read_text())
    assert len(limits) >= 9
    assert all(int(limit) <= 90 for _, limit in limits)
    assert {name for name, _ in limits if "$" not in name} - {
        "tests",
        "kernels",
        "decode-tiny",
    } <= (set(names))
    assert {"decode-greedy", "tests-triton_kernels-test_attention"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "arguments",
    [[], ["--smoke"], ["--out"], ["--out", "/dev/null/x"], ["--out", "/dev/null/x", "sleep"]],
)
def test_it_refuses_bad_arguments(arguments):
    outcome = _suite(*arguments)
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("gpu_suite.sh: ")


def _suite(*arguments):
    return subprocess.run(
        [str(SUITE), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=7 * HANGS,  # of so many steps
    )


@pytest.mark.slow
def test_ranks_take_turns_in_every_shape(tmp_path):
    path, script = tmp_path / "rows.jsonl", SUITE.with_name("run_distributed.py")
    small = "--context 300 --shapes 1x1 2x1 --passes 2 --kinds plain verify"
    command = [sys.executable, str(script), *small.split(), "--json", str(path)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert outcome.returncode == 0, outcome.stderr
    run, *rows = _lines(path)
    assert (run["kind"], run["context"]) == ("run", 300)
    assert [(row["shape"], row["pass"]) for row in rows] == [
        (shape, kind) for kind in ("fill", "plain", "verify") for shape in ("1x1", "2x1")
    ]
    assert all(row["wall_s"] >= row["least_wall_s"] > 0 for row in rows)
    assert rows[-1]["sent_bytes"][0] > 0 == rows[-2]["sent_bytes"][0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "/nowhere"], "--model: /nowhere"),
        (["--context", "0"], "--context: expected one positive number"),
        (["--shapes", "2x0"], "--shapes: expected RANKSxTHREADS or RANKSxTHREADSt, got '2x0'"),
        (["--rows", "-1"], "--rows"),
        (["--passes", "0"], "--passes"),
        (["--kinds", "prefill"], "--kinds"),
        (["--json", "/nowhere/rows.jsonl"], "--json: "),
        (["--fast"], "--fast"),
    ],
)
def test_bad_arguments_of_ranks_give_one_line_and_exit_2(arguments, named, capsys):
    with pytest.raises(SystemExit) as stop:
        run_distributed.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
