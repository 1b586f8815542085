"""The model of what attention takes on a GPU, beside what an H100 took, and who serves by it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specattn import attention_plans as plans
from specattn import gpu_record

KIB = 1024
MEASURED = Path(__file__).parents[1] / "bench/results/h100"
TOLERANCE = 0.08  # of a chain
OTHERS = 0.1  # of the sweeps of one backend each, lists of keys among them


def rows_of(name):
    """Return the timed rows of a file of results."""
    lines = (json.loads(line) for line in (MEASURED / name).read_text().splitlines())
    return [line for line in lines if line["kind"] == "row" and line["time"]]


def shape_of(row):
    """Return the shape of a row, 4 query heads for each of 8 of 128 columns."""
    keys = row["context"]
    if row.get("sparsity"):
        keys = -(-round(100 * row["sparsity"]) * keys // 100)
    return gpu_record.Shape(row["op"], "bf16", 128, 4 * row["rows"], keys, row["batch"])


def shape(rows, context, batch=1, op="hybrid_tree_attention"):
    return gpu_record.Shape(op, "bf16", 128, rows, context, batch)


def cut_at_2f0eb88(of):
    """Return how Gluon's kernel cut a call when it was measured."""
    block_m, resident = (64, 2) if of.rows <= 64 else (128, 1)
    programs = 8 * of.batch * -(-of.rows // block_m)
    wanted, wave = (max(1, x * 132 // programs) for x in (1, resident))
    wanted, wave = (min(x, 32) if x == 33 else 16 if x == 16 else x for x in (wanted, wave))
    most = max(4096, 64 * block_m)
    count = min(wanted * max(1, of.context // (most * wanted)), -(-of.context // (8 * block_m)))
    return plans.Cut(block_m, resident, max(1, min(count, wave) if of.batch == 1 else count))


def modelled(row):
    """Return who served a chain at 2f0eb88, and what the model makes of it in microseconds."""
    of = shape_of(row)
    kernel = "gluon" if of.rows > 16 else "cuda" if of.context <= 16 * KIB else "triton"
    then = {"early": False, "most_rows": 1}  # combines of one row a program, and tiles of 64 keys
    if kernel == "gluon":
        then |= {"cut": cut_at_2f0eb88(of), "tile": 1.0 if of.rows > 64 else None}
    return plans.microseconds(kernel, of, 8, 132, **then)


@pytest.mark.parametrize(
    "row", rows_of("chains.jsonl"), ids=lambda r: f"B{r['batch']}-{r['context']}-T{r['rows']}"
)
def test_the_model_is_near_every_chain_that_was_measured(row):
    assert modelled(row) == pytest.approx(row["time"]["median"] * 1e6, rel=TOLERANCE)


def timed_alone(kernel):
    """Return the rows of a sweep of one backend that one of its kernels served."""
    variants = {"contiguous", "shared"}
    rows = [row for row in rows_of(f"kernels-{kernel}.jsonl") if row["variant"] in variants]
    rows = [
        row for row in rows if row["op"] in ("hybrid_tree_attention", "sparse_gather_attention")
    ]
    return [row for row in rows if kernel == "cuda" or row["rows"] <= 4]


@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_the_model_is_near_what_each_kernel_took_alone(kernel):
    rows = timed_alone(kernel)
    assert len(rows) >= 8
    for row in rows:
        found = plans.microseconds(kernel, shape_of(row), 8, 132, early=False, most_rows=1)
        assert found == pytest.approx(row["time"]["median"] * 1e6, rel=OTHERS), row


def test_of_two_kernels_that_took_the_same_call_the_model_prefers_the_faster():
    """Where the one took a tenth longer, which is not in the noise."""
    taken = {
        kernel: {shape_of(row): row["time"]["median"] for row in timed_alone(kernel)}
        for kernel in ("cuda", "triton")
    }
    both = taken["cuda"].keys() & taken["triton"].keys()
    clear = [x for x in both if abs(taken["cuda"][x] / taken["triton"][x] - 1) > 0.1]
    assert len(clear) >= 5
    for of in clear:
        faster = min(taken, key=lambda kernel: taken[kernel][of])
        assert plans.fastest(of, "sm_90", 132, 8, ("cuda", "triton")) == faster


@pytest.mark.parametrize("name", ["gluon", "cuda"])
@pytest.mark.parametrize("context", [512, 4 * KIB, 32 * KIB, 64 * KIB, 128 * KIB])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("rows", [4, 16, 17, 64])
def test_whoever_serves_is_the_fastest_of_the_model(name, context, batch, rows, monkeypatch):
    """The two places that ask: the backend of `csrc/cuda`, and Triton's for Gluon's kernel."""
    of, seen = shape(rows, context, batch), ("triton", "gluon", "cuda")
    monkeypatch.setattr(gpu_record, "has_passed", lambda *_: True)
    monkeypatch.setattr(gpu_record, "winner", lambda *_: None)
    times = {kernel: plans.microseconds(kernel, of, 8, 132) for kernel in seen}
    if name == "cuda":
        served = plans.served_by("", of, "sm_90a", 132, 8, collects=False)
        assert served == min(times, key=times.get)
        return
    configs = pytest.importorskip("specattn.triton_kernels._configs")
    monkeypatch.setattr(configs, "INTERPRETED", SimpleNamespace(value=False))
    q = torch.empty(1, dtype=torch.bfloat16, device="meta")
    with configs.forced(arch="sm_90", multiprocessors=132):
        config = configs.hopper_config(q, of, 8, 0, collect="none", plain=True)
    assert (config is not None) == (times["gluon"] < times["triton"])


@pytest.mark.parametrize(
    ("rows", "context", "batch", "options", "fastest"),
    [
        # As an H100 found.
        (4, 4 * KIB, 1, {}, "gluon"),
        (16, 32 * KIB, 1, {}, "gluon"),
        (4, 4 * KIB, 8, {}, "gluon"),
        (17, 128 * KIB, 8, {}, "gluon"),
        (32, 8 * KIB, 1, {"collects": True}, "gluon"),
        (4, 32 * KIB, 1, {"collects": True}, "triton"),
        (4, 2304, 1, {"op": "sparse_gather_attention"}, "triton"),
        # Predicted: one block of Gluon's an SM reads as one of Triton's does, and begins faster.
        (4, 64 * KIB, 1, {}, "gluon"),
        (4, 32 * KIB, 8, {}, "gluon"),
        # One launch pays until combines that begin early cost less than its steps.
        (4, 1 * KIB, 1, {"collects": True}, "cuda"),
        (4, 8 * KIB, 1, {"collects": True}, "triton"),
        (4, 1 * KIB, 1, {"arch": "sm_100"}, "cuda"),
        (4, 32 * KIB, 1, {"arch": "sm_100"}, "triton"),
        (4, 8 * KIB, 1, {"arch": "sm_80"}, "cuda"),
        (16, 128 * KIB, 1, {"arch": "sm_80"}, "cuda"),
        (64, 4 * KIB, 1, {"arch": "sm_80"}, "triton"),
        (4, 32 * KIB, 8, {"arch": "sm_89"}, "cuda"),
    ],
)
def test_who_serves(rows, context, batch, options, fastest, monkeypatch):
    monkeypatch.setattr(gpu_record, "has_passed", lambda *_: True)
    monkeypatch.setattr(gpu_record, "winner", lambda *_: None)
    of = shape(rows, context, batch, options.get("op", "hybrid_tree_attention"))
    arch, collects = options.get("arch", "sm_90"), options.get("collects", False)
    processors = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148}[arch]
    assert plans.served_by("", of, arch, processors, 8, collects=collects) == fastest


def test_what_was_measured_here_outweighs_the_model(monkeypatch):
    monkeypatch.setattr(gpu_record, "winner", lambda gpu, _: "cuda" if gpu == "mine" else None)
    of = shape(4, 128 * KIB)
    assert plans.served_by("mine", of, "sm_90", 132, 8, collects=False) == "cuda"
    assert plans.served_by("other", of, "sm_90", 132, 8, collects=False) == "triton"


@pytest.mark.parametrize(("version", "rows"), [("3.6", 32), ("3.7", 64), ("", 64)])
def test_the_compiler_decides_how_large_tritons_tiles_are_on_hopper(version, rows, monkeypatch):
    monkeypatch.setattr(gpu_record, "triton_version", lambda: version)
    of = shape(64, 32 * KIB)
    assert plans.cut_of("triton", of, 8, 132).block_m == rows
    assert plans.cut_of("triton", of, 8, 108, plans.A100).block_m == 64


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_every_architecture_has_a_gpu_that_stands_for_it(arch):
    expected = {"sm_80": plans.A100, "sm_90a": plans.H100, "sm_100": plans.B200}
    assert plans.gpu_of(arch) == expected.get(arch, plans.L40S)
