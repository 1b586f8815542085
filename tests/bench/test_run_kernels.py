"""The benchmark: formulas against counting by hand, and rows that nobody should trust refused."""

import importlib
import json
import os
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import run_kernels  # noqa: E402
from common.clock import Stopwatch, paired_ratio, spread  # noqa: E402
from kernels import inputs, peers  # noqa: E402
from kernels.cases import EIGHT_BITS, Axes, Case  # noqa: E402
from kernels.ceilings import Ceilings, Probe  # noqa: E402
from kernels.measure import measure, memory_needed, row_error  # noqa: E402
from kernels.workloads import OPS, build, sweep  # noqa: E402

from specattn import ops  # noqa: E402
from specattn.backends import select  # noqa: E402
from specattn.machine_load import Others  # noqa: E402
from specattn.ops.cost import Cost, Sizes  # noqa: E402
from specattn.planning import MODELS  # noqa: E402

CPU = torch.device("cpu")
SMALL = "--backend reference --shape tiny --context 256 --rows 1,4 --budget 0.01 --peers sdpa"
SMALL = [*SMALL.split(), "--peers", "composition"]


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
    """Buffers of a few megabytes: what is measured does not matter here, only that it is."""
    for module in ("kernels.ceilings", "common.clock"):
        monkeypatch.setattr(f"{module}.last_level_cache", lambda device: 1 << 18)
    monkeypatch.setattr("kernels.ceilings._PRODUCTS", {"cpu": ((64, 64, 64),)})
    monkeypatch.setattr("kernels.ceilings._LAYER", (64, 64))


# A terabyte, and 10 or 1 tera-operations per second; nothing is read to find that out.
RATES = {"bf16": 1e13, "fp32": 1e12}
CEILINGS = Ceilings(1e12, "none", 5e11, RATES, {}, 1e-6, Probe(lambda: None, 1))


def axes(shape=MODELS["tiny"], dtype="bf16", batch=1, context=256, rows=(1, 4), **more):
    return Axes([shape], [dtype], [batch], [context], rows, **more)


def nbytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


# One request, 2 rows, 4 query and 2 KV heads of 8, bf16: a state is 2*4*(16+4) = 160 bytes, the
# queries 128, K and V of one token 64.
HAND = Sizes(B=1, T=2, Hq=4, Hk=2, D=8, e=2)


CACHED = {"S": 2, "tree_pairs": 3, "L": 10, "N": 16, "indices": 1}
ATTEND = 12 * 32 + 2 * 4 * 10 * 32  # operations: 3 visible pairs and 2 rows of 10 keys, 4 heads


@pytest.mark.parametrize(
    ("op", "sizes", "read", "written", "operations"),
    [
        # q, two new tokens, two mask words; 3 visible pairs of 4 heads: 3*4 dots and 3*4 sums of 8.
        ("tree_attention", {"S": 2, "tree_pairs": 3, "mask_words": 2}, 256 + 16, 160, 12 * 32),
        ("merge_state", {"states": 2}, 320, 160, 2 * 2 * 64),
        ("merge_states", {"states": 5}, 800, 160, 2 * 5 * 64),
        # Ten cached tokens more, one length; 2 rows of 4 heads see each of them.
        ("hybrid_tree_attention", CACHED, 256 + 640 + 4, 160, ATTEND),
        # One float32 score per KV head and place of the cache; one more query row per KV head.
        ("verify_attention/scores", CACHED, 900, 160 + 2 * 16 * 4, ATTEND + 2 * 10 * 16),
        # Two rows of 4 heads in bf16; no dot that attention does not do anyway.
        ("verify_attention/logits", CACHED | {"collected_rows": 2}, 900, 160 + 256, ATTEND),
        # Three of the tokens per KV head: 6 positions and 2 lengths.
        (
            *("sparse_gather_attention", CACHED | {"L": 3, "indices": 8}),
            *(256 + 3 * 64 + 32, 160, 12 * 32 + 2 * 4 * 3 * 32),
        ),
        # Only K is read; the mean query of each KV head meets each key once.
        (
            *("importance_scores", {"L": 10, "N": 16, "indices": 1, "score_rows": 2}),
            *(128 + 320 + 4, 2 * 16 * 4, 2 * 10 * 16),
        ),
        # 10 scores of one list, 4 positions and a length out.
        (
            *("select_topk", {"L": 10, "N": 16, "indices": 1, "score_rows": 1, "selected": 4}),
            *(40 + 4, 16 + 4, 10),
        ),
        # Two new tokens and two slots in, the tokens out.
        ("write_kv", {}, 128 + 16, 128, 0),
    ],
)
def test_cost_formulas_match_counting_by_hand(op, sizes, read, written, operations):
    primitive, _, collects = op.partition("/")
    module = importlib.import_module("specattn.ops." + primitive.replace("states", "state"))
    formula = getattr(module, f"cost_{collects}" if collects else "cost")
    cost = formula(replace(HAND, **sizes))
    assert (cost.read, cost.written, cost.operations) == (read, written, operations)
    assert cost.bytes == read + written


def test_cost_of_a_layer_matches_counting_by_hand():
    # Two matrices of 5 x 8, 3 rows of x and of the result, bf16; each weight meets each row.
    x, weight = torch.empty(3, 8).bfloat16(), torch.empty(5, 8).bfloat16()
    cost = importlib.import_module("specattn.ops.linear_few_rows").cost(x, weight, products=2)
    assert (cost.read, cost.written, cost.operations) == (2 * (80 + 24), 30, 2 * 2 * 3 * 40)


@pytest.mark.parametrize("batch", [1, 3])
def test_written_bytes_are_those_of_the_real_outputs(batch):
    for case in sweep(
        axes(
            replace(MODELS["tiny"], q_heads=6, kv_heads=2, head_dim=24),
            "fp32",
            batch,
            100,
            (1, 5),
            page_sizes=(1, 16, 64),
        )
    ):
        work = build(case, inputs.Draw(case, CPU, 0))
        written = nbytes(*work.call().values())
        assert work.cost.written == written, case


def test_every_peer_computes_what_the_primitive_computes():
    stopwatch = Stopwatch(CPU)
    for case in sweep(axes(dtype="fp32", batch=2, context=300, rows=(1, 5))):
        row = measure(case, stopwatch, CEILINGS, budget=1e-3)
        assert row["fault"] is None
        assert row["peers"]
        assert row["refused"] == {}, case
        if case.variant in EIGHT_BITS:
            assert list(row["peers"]) == ["fp32 cache"]
        elif case.op == "hybrid_tree_attention":
            assert any("flash + masked matmul + merge" in name for name in row["peers"])


def test_absent_peers_are_named_with_the_reason():
    reasons = peers.missing(CPU, peers.QUICK)
    assert "not installed" in reasons["xformers"] or "GPU" in reasons["xformers"]
    assert "GPU" in reasons["varlen"]
    assert reasons["flex"] == "not asked for"
    assert "sdpa" not in reasons


def test_the_ceiling_that_binds_is_the_one_that_takes_longest():
    cost = Cost(read=10**9, written=10**9, operations=10**10)
    bounds = CEILINGS.bounds(cost, "bf16", bandwidth=1e12)
    assert bounds == pytest.approx({"memory": 2e-3, "matrix": 1e-3, "call": 1e-6})
    assert CEILINGS.bounds(cost, "fp32", bandwidth=1e12)["matrix"] == pytest.approx(1e-2)


def test_layers_are_those_of_the_model():
    cases = [case for case in sweep(axes(rows=(1, 64, 69))) if case.op == "linear_few_rows"]
    assert {case.rows for case in cases} == {1, 64}
    found = {case.variant: build(case, inputs.Draw(case, CPU, 0)).cost for case in cases}
    of_hand = {"qkv": 768 * 256, "output": 256 * 512, "gate and up": 2 * 1024 * 256}
    of_hand |= {"down": 256 * 1024, "head": 4096 * 256}
    bits = {"output, int8": 8, "output, int4": 4, "output, fp8": 8}
    of_hand |= dict.fromkeys(bits, 256 * 512)
    for case in cases:
        assert case.weights == of_hand[case.variant]
        assert found[case.variant].read > bits.get(case.variant, 16) * case.weights // 8
    large = sweep(axes(shape=MODELS["llama-3.1-8b"], context=1))
    assert "head" not in {case.variant for case in large}  # a gigabyte
    assert memory_needed(replace(cases[0], shape=MODELS["llama-3.1-8b"]), CPU) > 3 * 6144 * 4096 * 2


def test_a_paged_cache_holds_the_contiguous_one_in_another_order():
    case = Case("hybrid_tree_attention", "", MODELS["tiny"], "fp32", 2, 90, 4)
    linear = inputs.prefix(case, inputs.Draw(case, CPU, 0))
    case = replace(case, page_size=16)
    paged = inputs.prefix(case, inputs.Draw(case, CPU, 0))
    for a, b in zip(linear.keys(), paged.keys(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.isfinite().all()
    assert linear.k_cache[:, 94:].isnan().all()


def test_row_error_finds_what_a_mean_would_hide():
    right = torch.randn(64, 128)
    assert row_error(right, right) == 0
    wrong = right.clone()
    wrong[63] *= 1.5
    assert row_error(wrong, right) == pytest.approx(0.5)
    for spoilt in (float("nan"), float("-inf"), float("inf")):
        wrong = right.clone()
        wrong[5, 7] = spoilt
        assert row_error(wrong, right) == float("inf")
    assert row_error(right[:, :64], right) == float("inf")
    empty = torch.full((2, 4), float("-inf"))
    assert row_error(empty, empty) == 0
    indices = torch.arange(4)
    assert row_error(indices, indices) == 0
    assert row_error(indices + 1, indices) == float("inf")


def test_ratios_are_taken_within_rounds():
    slow_second_round = [1.0, 10.0, 1.0], [2.0, 20.0, 2.0]
    assert paired_ratio(*slow_second_round) == 2.0
    assert spread([1.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


def test_the_work_of_others_is_counted_and_ours_is_not(monkeypatch, tmp_path):
    stat, tick = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr("specattn.machine_load.STAT", stat)
    clock, own = iter([10.0, 14.0]), iter([(1.0, 0.5, 0.0, 0.0), (3.0, 0.5, 0.0, 0.0)])
    monkeypatch.setattr(
        "specattn.machine_load.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    monkeypatch.setattr("specattn.machine_load.os.times", lambda: next(own))
    # user, nice, system, idle, iowait, irq, softirq, steal
    stat.write_text(f"cpu {10 * tick} 0 0 0 0 0 0 0 0 0\ncpu0 1\n")
    others = Others()
    # Four seconds later: 5 s of user time, of which 2 s are ours, and 1 s stolen; idle is no work.
    stat.write_text(f"cpu {15 * tick} 0 0 {99 * tick} 0 0 0 {tick} 0 0\ncpu0 1\n")
    assert others.cores() == pytest.approx(1.0)


def test_every_primitive_has_a_workload():
    """The fourth place of a primitive (CONTRIBUTING)."""
    assert set(OPS) == {name for name in ops.__all__ if not name.startswith("lse_")}


def test_chains_of_one_row_are_among_those_that_are_asked_for():
    parser = run_kernels._parser()
    given = "--quick --only hybrid_tree_attention --context 300 --rows 1,4 --variant chain"
    found = run_kernels._cases(parser.parse_args(given.split()), CPU, parser)
    assert [(one.variant, one.rows) for one in found] == [("contiguous", 1), ("chain", 4)]


def test_a_small_run_writes_a_table_and_valid_json_lines(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert (
        run_kernels.main([*SMALL, "--worst", "--json", str(path), "--pictures", str(tmp_path)]) == 0
    )
    run, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert run["kind"] == "run"
    assert run["schema"] == 2
    assert run["backend"] == "reference"
    assert run["versions"]["torch"] == torch.__version__
    assert run["ceilings"]["bandwidth"] == max(run["ceilings"]["read"], run["ceilings"]["copy"])
    assert {row["op"] for row in rows} == set(OPS)
    for row in rows:
        assert row["fault"] is None
        assert row["time"]["median"] > 0
        assert row["time"]["samples"] >= 5
        moved = row["bytes_read"] + row["bytes_written"]
        assert row["bandwidth"] == pytest.approx(moved / row["time"]["median"])
        assert set(row["bounds"]) == {"memory", "matrix", "call"}
        assert row["bounds"]["memory"] == pytest.approx(moved / row["ceiling"])
        assert row["bounds"][row["bound"]] == max(row["bounds"].values())
        assert row["share"] == pytest.approx(row["bounds"][row["bound"]] / row["time"]["median"])
    for name in ("roofline.png", "context.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "best peer" in printed
    assert "WRONG" not in printed
    assert all(op in printed for op in OPS)


@pytest.fixture
def planted(monkeypatch):
    """Return a function that replaces every kernel of the backend."""

    def plant(kernel):
        select._chosen.cache_clear()
        monkeypatch.setattr(select, "_find", lambda *call: (kernel, ""))

    yield plant
    select._chosen.cache_clear()


def test_a_wrong_kernel_prints_wrong_and_no_time(planted, tmp_path, capsys):
    def nothing_attended(*arguments):
        for output in arguments[-2:]:
            output.zero_()

    planted(nothing_attended)
    path = tmp_path / "rows.jsonl"
    arguments = [*SMALL, "--only", "tree_attention", "--json", str(path)]
    assert run_kernels.main(arguments) == 1
    _, row = [json.loads(line) for line in path.read_text().splitlines()]
    assert row["fault"] == "WRONG"
    assert row["time"] is row["bandwidth"] is row["share"] is None
    printed = capsys.readouterr().out
    assert "WRONG" in printed
    (line,) = [line for line in printed.splitlines() if "WRONG" in line]
    assert not re.search(r"\d (us|ms)\b", line)


def test_what_a_forced_backend_does_not_serve_is_no_fault(planted, capsys):
    planted(None)
    assert run_kernels.main([*SMALL, "--only", "merge_states"]) == 0
    assert "1 of 1 rows are not served by reference" in capsys.readouterr().out


def test_a_crashing_kernel_costs_only_its_own_row(planted, tmp_path, capsys):
    def crash(*arguments):
        raise RuntimeError("no such instruction\nand much more")

    planted(crash)
    assert run_kernels.main([*SMALL, "--only", "merge_state", "--only", "merge_states"]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("FAILED") == 2
    assert "RuntimeError: no such instruction" in captured.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--only", "flash_attention"], "flash_attention"),
        (["--bars", "--only", "flash"], "hybrid-1"),
        (["--emulate", "sm_90", "--backend", "cpu"], "--emulate: expected "),
        (["--context", "-3"], "--context"),
        (["--context", "8q"], "--context"),
        (["--rows", ""], "--rows"),
        (["--sparsity", "7"], "--sparsity"),
        (["--page-size", "0"], "--page-size"),
        (["--peers", "cuBLAS"], "cuBLAS"),
        (["--budget", "nan"], "--budget"),
        (["--shape", "gpt-9"], "gpt-9"),
        (["--backend", "cuda"], "cuda"),
        (["--json", "/nowhere/rows.jsonl"], "/nowhere/rows.jsonl"),
        (["--fast"], "--fast"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_2(arguments, named, capsys):
    with pytest.raises(SystemExit) as stop:
        run_kernels.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def _documented(kind):
    """Return the fields of one kind of line that the documentation names, outside parentheses."""
    text = (BENCH / "README.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `kind: {kind}` |")]
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", line.split("|", 2)[2])))


def test_the_documentation_names_every_field(tmp_path):
    path = tmp_path / "rows.jsonl"
    run_kernels.main([*SMALL, "--only", "merge_state", "--json", str(path)])
    run, row = [json.loads(line) for line in path.read_text().splitlines()]
    assert set(run) - {"kind"} == _documented("run")
    assert set(row) - {"kind"} == _documented("row")
    pytest.importorskip("specattn._cpu")
    from kernels.bar import Bar

    assert {field.name for field in fields(Bar)} | {"met", "others"} == _documented("bar")
