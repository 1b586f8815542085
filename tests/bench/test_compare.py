"""What changed between two result files, and what only seems to; and their pictures."""

import json
import sys
from pathlib import Path

import pytest
import torch

from specattn import _cpu

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import run_decoding  # noqa: E402
import run_kernels  # noqa: E402
from common.machine import describe, heading  # noqa: E402
from decoding import pictures as decoding  # noqa: E402
from kernels import pictures as kernels  # noqa: E402

RUN = {
    "kind": "run",
    "machine": {"name": "synthetic"},
    "commit": "0123456789ab",
    "time": "2026-11-21T10:00:00+00:00",
    "ceilings": {"bandwidth": 3e10, "matrix": {"bf16": 1e12}},
}


def row(op="hybrid_tree_attention", context=8192, median=1e-3, spread=0.02, **more):
    return {
        "kind": "row",
        "op": op,
        "variant": "contiguous",
        "shape": "tiny",
        "dtype": "bf16",
        "batch": 1,
        "context": context,
        "rows": 16,
        "page_size": 0,
        "sparsity": None,
        "operations": context * 1000,
        "bytes_read": context * 500,
        "bytes_written": 100,
        "share": 0.5,
        "time": {"median": median, "spread": spread, "samples": 9},
        "peers": {"sdpa gqa": {"median": 5 * median, "spread": 0.1, "samples": 9, "ratio": 5}},
        **more,
    }


def bar(name, measured, at_most=False, spread=0.02):
    return {
        "kind": "bar",
        "name": name,
        "measured": measured,
        "at_most": at_most,
        "spread": spread,
    }


@pytest.fixture
def compare(tmp_path, capsys):
    def run(before, after):
        paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
        for path, records in zip(paths, (before, after), strict=True):
            path.write_text("\n".join(map(json.dumps, [RUN, *records])) + "\n")
        status = run_kernels.main(["--compare", *map(str, paths)])
        return status, capsys.readouterr().out

    return run


def test_only_what_exceeds_the_spread_is_slower(compare):
    before = [row(context=1024), row(context=2048), row(context=4096)]
    after = [row(context=1024, median=1.5e-3), row(context=2048, median=1.03e-3)]
    after.append(row(context=4096, median=5e-4))
    status, printed = compare(before, after)
    assert status == 1
    slower = [line for line in printed.splitlines() if line.startswith("slower")]
    assert len(slower) == 1
    assert "1.50x" in slower[0]
    assert "1024" in slower[0]
    assert "1 slower, 1 faster, 1 within the spread; 0 in one file only" in printed


def test_a_file_beside_itself_has_not_changed(compare):
    records = [row(), bar("gather", 1.2, at_most=True)]
    status, printed = compare(records, records)
    assert status == 0
    assert "0 slower, 0 faster, 2 within the spread; 0 in one file only" in printed


def test_a_record_says_which_processor_it_is_of():
    """Its name may be that of several generations: "AMD EPYC"."""
    run = describe(torch.device("cpu"))
    assert run["machine"]["kind"] == _cpu.machine()
    assert f"{run['machine']['name']} | {_cpu.machine()} | commit" in heading(run)
    assert heading(run | {"machine": {"name": "older"}}).startswith("older | commit")


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [("zen4", "zen5", True), ("zen4", "zen4", False), (None, "zen5", False)],
)
def test_processors_of_one_name_are_two_machines(tmp_path, capsys, first, second, told):
    paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, kind in zip(paths, (first, second), strict=True):
        machine = RUN["machine"] | ({"kind": kind} if kind else {})
        path.write_text("\n".join(map(json.dumps, [RUN | {"machine": machine}, row()])) + "\n")
    assert run_kernels.main(["--compare", *map(str, paths)]) == 0
    assert ("two machines" in capsys.readouterr().out) == told


def test_a_row_that_became_wrong_comes_first(compare):
    wrong = row(context=2048) | {"time": None, "share": None, "fault": "WRONG"}
    status, printed = compare([row(), row(context=2048)], [row(median=2e-3), wrong])
    assert status == 1
    assert "WRONG" in printed.splitlines()[2]


def test_a_bar_is_worse_in_its_own_direction(compare):
    before = [bar("share", 0.8), bar("over", 0.01, at_most=True)]
    status, printed = compare(before, [bar("share", 0.6), bar("over", 0.005, at_most=True)])
    assert status == 1
    assert "slower" in next(line for line in printed.splitlines() if "share" in line)
    assert "faster" in next(line for line in printed.splitlines() if " over:" in line)


def decoded(context=4096, speed=100.0, tau=3.0, over_plain=1.2, **more):
    return {
        "kind": "row",
        "section": None,
        "model": "tiny",
        "method": "vegas",
        "settings": {"gamma": 6},
        "context": context,
        "batch": 1,
        "temperature": 0.0,
        "fault": None,
        "tokens_per_second": {"median": speed, "spread": 0.05, "samples": 3},
        "tau": tau,
        "speedup": {"plain": over_plain},
        **more,
    }


def test_decoding_is_compared_by_seconds_per_token(tmp_path, capsys):
    timed = {"kind": "pass", "name": "verify", "model": "tiny", "context": 4096}
    before = [decoded(), decoded(8192), decoded(16384), decoded(32768)]
    before.append(timed | {"time": {"median": 1e-3, "spread": 0.01}})
    after = [decoded(speed=50.0, tau=2.0, over_plain=0.6), decoded(8192, speed=97.0)]
    after += [decoded(16384, fault="out of memory"), decoded(32768, speed=200.0)]
    after.append(timed | {"time": {"median": 5e-4, "spread": 0.01}})
    paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, records in zip(paths, (before, after), strict=True):
        path.write_text("\n".join(map(json.dumps, [RUN, *records])) + "\n")
    assert run_decoding.main(["--compare", *map(str, paths)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "vegas gamma=6, 16k" in lines[2]
    assert "failed" in lines[2]
    assert "2.00x" in lines[3]
    assert "x plain 1.20 -> 0.60, tau 3.00 -> 2.00" in lines[3]
    assert lines[-1].startswith("2 slower, 2 faster, 1 within the spread; 0 in one file only")


@pytest.mark.parametrize("content", ["", "hello", '{"kind": "row"}', "[]"])
def test_other_files_are_refused(content, tmp_path, capsys):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    twice = ["--compare", str(path), str(path)]
    for main, arguments in (
        (run_kernels.main, twice),
        (run_kernels.main, ["--draw", str(path)]),
        (run_decoding.main, twice),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert "x.jsonl" in said
        assert said.count("\n") == 1


def test_a_result_file_is_drawn_and_nothing_of_nothing(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, out = tmp_path / "rows.jsonl", tmp_path / "out"
    records = [RUN, row(context=1024), row("merge_state", 0), row("select_topk") | {"time": None}]
    path.write_text("\n".join(map(json.dumps, records)))
    assert run_kernels.main(["--draw", str(path), "--pictures", str(out)]) == 0
    assert capsys.readouterr().out.split() == [
        str(out / name) for name in ("roofline.png", "context.png")
    ]
    assert all(png.read_bytes().startswith(b"\x89PNG") for png in out.iterdir())
    folder, failed = tmp_path / "none", decoded(fault="out of memory")
    assert kernels.draw(RUN, [row() | {"time": None}], folder) == []
    assert decoding.draw([failed], folder, None, decoding.KINDS, "") == []
    assert not folder.exists()
