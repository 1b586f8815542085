"""Who was fastest: from made-up sweeps of several backends to what backends read."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import winners as script  # noqa: E402

from specattn import gpu_record  # noqa: E402

SIZES = {"op": "hybrid_tree_attention", "dtype": "bf16", "shape": "llama-3.1-8b", "sparsity": None}


def sweep(path, backend, times, machine="H200"):
    """Write a sweep with `times` {(rows, context, variant): seconds}, None where it failed."""
    records = [{"kind": "run", "machine": {"name": machine}, "backend": backend}]
    for (rows, context, variant), time in times.items():
        fault = None if time else "not served"
        row = {"rows": rows, "context": context, "variant": variant, "batch": 1, "page_size": 0}
        median = {"median": time} if time else None
        records.append({"kind": "row", **SIZES, **row, "fault": fault, "time": median})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def sweeps(tmp_path):
    cuda = {(1, 1024, "x"): 1.0, (1, 1024, "y"): 5.0, (16, 1024, "x"): 3.0, (64, 1024, "x"): None}
    triton = {(1, 1024, "x"): 2.0, (1, 1024, "y"): 3.0, (16, 1024, "x"): 2.0, (64, 1024, "x"): 1.0}
    times = {"cuda": cuda, "triton": triton, "other": {(1, 1024, "x"): 0.1}}
    return [sweep(tmp_path / name, name, of) for name, of in times.items()]


def shape(rows, context=1024, **changed):
    sizes = {"op": "hybrid_tree_attention", "dtype": "bf16", "head_dim": 128, "rows": 4 * rows,
             "context": context, "batch": 1}  # fmt: skip
    return gpu_record.Shape(**sizes | changed)


@pytest.fixture
def written(sweeps, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    assert script.main(sweeps) == 0
    return gpu_record.path()


def test_the_fastest_over_all_cases_of_a_shape_wins(written):
    # cuda 1 and 5, triton 2 and 3: geometric means of 2.24 and 2.45; the third served one alone.
    assert gpu_record.winner("H200", shape(1)) == "cuda"
    assert gpu_record.winner("H200", shape(16)) == "triton"


def test_what_one_alone_measured_is_no_race(written):
    rows = [row["shape"]["rows"] for row in json.loads(written.read_text())["fastest"]["H200"]]
    assert rows == [4, 64]


@pytest.mark.parametrize(
    ("near", "expected"),
    [
        (shape(2), "cuda"),
        (shape(1, 2048), "cuda"),
        (shape(1, 3000), None),
        (shape(2, 2048), None),
        (shape(12), "triton"),
        (shape(1, 1 << 20), None),
        (shape(1, head_dim=64), None),
        (shape(1, dtype="fp16"), None),
    ],
)
def test_the_nearest_shape_answers(written, near, expected):
    assert gpu_record.winner("H200", near) == expected


def test_another_gpu_has_no_table(written):
    assert gpu_record.winner("A100", shape(1)) is None


def test_a_broken_table_is_said_and_left(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    (tmp_path / "gpus.json").write_text('{"schema": 2')
    with pytest.warns(UserWarning, match=r"gpus\.json is no record of GPUs"):
        assert gpu_record.winner("H200", shape(1)) is None


def test_sweeps_of_two_machines_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    times = {(1, 1024, "x"): 1.0}
    two = [sweep(tmp_path / name, name, times, machine=name) for name in ("a", "b")]
    with pytest.raises(SystemExit):
        script.main(two)
    assert "expected sweeps of one machine, got a, b" in capsys.readouterr().err
    assert not gpu_record.path().exists()


def test_what_passed_holds_for_its_architecture_and_joins_what_was_measured(written, monkeypatch):
    assert not gpu_record.has_passed("cuda", (9, 0))
    monkeypatch.setattr(gpu_record, "triton_version", lambda: "3.6")  # which we have seen pass
    assert gpu_record.has_passed("gluon", (9, 0))
    assert not gpu_record.has_passed("gluon", (10, 0))
    gpu_record.note_passed(["cuda", "triton"], (9, 0))  # what is found here decides
    assert gpu_record.has_passed("cuda", (9, 0))
    assert not gpu_record.has_passed("gluon", (9, 0))
    assert not gpu_record.has_passed("cuda", (8, 0))
    assert gpu_record.winner("H200", shape(1)) == "cuda"
    gpu_record.note_passed(["triton"], (9, 0))
    assert not gpu_record.has_passed("cuda", (9, 0))
