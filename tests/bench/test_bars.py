"""The bars: ratios that a wrong kernel cannot meet."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

pytest.importorskip("specattn._cpu")

import run_kernels  # noqa: E402
from kernels import bar, bars, inputs, report, rotation  # noqa: E402
from kernels.bar import Bar  # noqa: E402
from kernels.peers import FAMILIES  # noqa: E402

from specattn import _cpu  # noqa: E402
from specattn.backends import select  # noqa: E402
from specattn.ops.cost import Cost  # noqa: E402
from specattn.planning import MODELS  # noqa: E402

SMALL = replace(bars.HYBRID, context=300, rows=3, variant="tree")
TINY = replace(bars.LAYER, shape=MODELS["tiny"], variant="gate and up", dtype="fp32")


@pytest.fixture(params=_cpu.isas())
def path(request):
    before = _cpu.isa()
    _cpu.use_isa(request.param)
    yield request.param
    _cpu.use_isa(before)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(bar, "last_level_cache", lambda device: 1 << 20)
    monkeypatch.setattr(bar, "Pool", lambda size: rotation.Pool(1 << 25))
    return bar.Bench(budget=0.01)


def test_a_place_comes_again_only_after_all_others(bench):
    case = replace(SMALL, dtype="fp32")
    places = rotation.Rotation(bench.pool, case).places
    pointers = sorted(place.data_ptr() for place in places)
    assert len(pointers) > 4
    assert all(b - a == places[0].nbytes for a, b in zip(pointers, pointers[1:], strict=False))
    values = places[-1].float()
    assert values.mean().abs() < 0.01
    assert values.std() == pytest.approx(1, abs=0.01)
    seen = []
    turns = rotation.Rotation(bench.pool, case)
    first = turns.turn([lambda: seen.append("a0"), lambda: seen.append("a1")])
    second = turns.turn([lambda: seen.append("b0"), lambda: seen.append("b1")])
    for call in (first, second, second, first):
        call()
    assert seen == ["a0", "b1", "b0", "a1"]


def test_a_row_is_held_against_the_ceiling_that_binds(bench):
    (share,) = bars.hybrid(bench, SMALL, share=0.5)
    assert 0 < share.measured < 1.5
    assert share.bound in ("memory", "products")
    assert "GB/s" in share.note
    assert "GFLOP/s" in share.note


def test_a_cache_of_8_bits_is_held_against_one_of_16(bench, monkeypatch):
    at = bars._at
    monkeypatch.setattr(bars, "_at", lambda context, *rest: at(300, *rest))
    (found,) = bars.eight_bits(bench, "e4m3", rows=3)
    assert (found.name, found.target) == ("hybrid, chain of 3 rows, e4m3, 300 keys, over bf16", 1.2)
    assert found.measured > 0
    place = rotation.Rotation(bench.pool, replace(SMALL, variant="chain, int8")).places[0]
    codes, scales = inputs.of_8_bits(place, torch.int8, SMALL.shape.head_dim)
    assert (scales == inputs.SCALE).all()
    assert (codes.float() * inputs.SCALE).std() == pytest.approx(1, abs=0.02)


def test_records_have_the_names_of_today():
    """The same bars of two records are compared by them; T, the temperature, is in none."""
    hybrid = [one for one in bars.SUITE.values() if getattr(one, "func", None) is bars.hybrid]
    names = {bars._name(one.keywords["case"]) for one in hybrid}
    results = Path(__file__).parents[2] / "bench/results"
    lines = [line for file in results.glob("*/bars*.jsonl") for line in file.open()]
    recorded = {one["name"] for one in map(json.loads, lines) if one["kind"] == "bar"}
    assert names <= recorded
    assert {"hybrid, fp32, tree of 16 rows, 32768 keys", "hybrid, 1 row, 32768 keys"} <= names
    assert [name for name in recorded if "T=" in name or " 1 rows" in name] == []


@pytest.mark.parametrize(
    ("places", "operations", "bound"), [(10, 1, "memory"), (1, 10, "products")]
)
def test_the_longer_least_time_binds(bench, monkeypatch, places, operations, bound):
    """With clocks that tick as told, a share is the longer of two least times over ours."""
    rotated = rotation.Rotation(bench.pool, SMALL)
    (work, *_) = works = rotated.workloads(SMALL)
    cost = Cost(places * rotated.place_bytes, 0, operations)
    works[0] = replace(work, cost=cost)
    monkeypatch.setattr(bar.Products, "of", lambda dtype: bar.Products(lambda: 1, 1))
    ticks = {"ours": [40.0] * 9, "memory": [2.0] * 9, "products": [2.0] * 9}
    monkeypatch.setattr(bench, "times", lambda **calls: {name: ticks[name] for name in calls})
    found = bench.share(rotated, works, "bf16", 0.5, "a call")
    assert (found.bound, found.measured) == (bound, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_take_as_long_as_there_are(path, dtype):
    """Twice the rounds are twice the operations, and nothing is optimised away."""
    name = str(dtype).removeprefix("torch.")

    def least(rounds):
        times = []
        for _ in range(20):
            start = time.process_time()
            operations = _cpu.multiply_registers(name, rounds, 1)
            times.append(time.process_time() - start)
        return operations, min(times)

    (few, short), (many, long) = least(1 << 16), least(1 << 19)  # calls take up to 50 us besides
    assert many == 8 * few > 0
    assert 4 < long / short < 16
    vectors = {"generic": 4, "avx2": 8, "avx512": 16, "avx512_bf16": 16}
    if path in vectors and not (path == "avx512_bf16" and dtype == torch.bfloat16):
        # At most two vectors are multiplied and added per cycle, of at most 6 GHz.
        assert many / long < 2 * 2 * vectors[path] * 6e9


def test_products_of_an_unknown_type_are_refused():
    with pytest.raises(ValueError, match="expected float32, bfloat16 or float16, got int8"):
        _cpu.multiply_registers("int8", 1, 1)


def test_every_peer_that_is_here_takes_its_turn(bench):
    faster, absent = bars.peers(bench, replace(SMALL, variant="chain"), sdpa=2.0, vllm=2.0)
    assert faster.measured > 0
    assert "sdpa" in faster.note
    if reason := FAMILIES["vllm"].why_not(bar.CPU):
        assert absent.measured is None
        assert not absent.met
        assert reason in absent.note
        assert report.bar(absent, disturbed=False).startswith("absent")


def test_a_gather_is_held_against_neighbours_and_shows_what_scattered_rows_cost(bench, monkeypatch):
    monkeypatch.setattr(bars, "HYBRID", replace(bars.HYBRID, context=300))
    (found,) = bars.gather(bench, at_most=1e9)
    assert found.met
    assert "a plain read of these rows takes" in found.note


def test_rows_that_are_no_whole_lines_are_refused():
    rows = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected multiples of 64"):
        _cpu.read_rows(64, 100, rows.data_ptr(), 1, 1)


def test_a_path_that_is_not_the_best_has_ceilings_of_its_own(bench):
    before, path = _cpu.isa(), _cpu.isas()[-1]
    (one,) = bars.held(bench, path, SMALL, share=0.5)
    assert one.measured > 0
    assert one.name.startswith(f"{path} only")
    (other,) = bars.held(bench, "vector 9000", SMALL, share=0.5)
    assert other.measured is None
    assert _cpu.isa() == before


def test_a_layer_is_held_against_a_read_and_against_torch(bench):
    share, ratio = bars.linear(bench, TINY, rows=2, share=0.75)
    assert share.measured > 0
    assert ratio.measured > 0
    assert "torch linear" in ratio.note
    rotated = rotation.Rotation(bench.pool, TINY)
    assert rotated.place_bytes == 2 * 1024 * 256 * 4


def test_a_wrong_kernel_meets_no_bar(bench, monkeypatch):
    def nothing_attended(*arguments):
        for output in arguments[-2:]:
            if output is not None:
                output.zero_()

    select._chosen.cache_clear()
    monkeypatch.setattr(select, "_find", lambda *call: (nothing_attended, ""))
    found = [
        *bars.hybrid(bench, SMALL, share=0.0001),
        *bars.peers(bench, SMALL, sdpa=0.0001),
        *bars.over(bench, "tree", SMALL, SMALL, at_most=1e9),
        *bars.merge(bench, torch_times=0.0001, share=0.0001),
        *bars.linear(bench, TINY, rows=2, share=0.0001),
    ]
    select._chosen.cache_clear()
    assert len(found) == 6
    assert all(one.measured is None and one.note == "WRONG" and not one.met for one in found)


def test_bars_of_states_leave_the_memory_as_they_found_it(bench, monkeypatch):
    """Later bars draw caches from it: what a commit leaves there is no normal value."""
    before = bench.pool.memory.clone()
    (commit,) = bars.states(bench, "gated_delta_commit", rows=8, share=0.5)
    assert commit.measured > 0
    assert bench.pool.memory.equal(before)

    def spoils(q, k, v, *gates):
        return lambda state: (state.fill_(math.nan), v)[1]

    here = FAMILIES["vllm"]._replace(why_not=lambda device: "")
    monkeypatch.setitem(FAMILIES, "vllm", here)
    monkeypatch.setattr(bars.vllm, "snapshots", spoils)
    monkeypatch.setattr(bars, "THREADS", torch.get_num_threads())
    (peer,) = bars.snapshots(bench, rows=2, times=1.0)
    assert peer.note == "WRONG"
    assert bench.pool.memory.equal(before)
    (verify,) = bars.states(bench, "gated_delta_tree", rows=8, share=0.5)
    (later,) = bars.hybrid(bench, SMALL, share=0.5)
    assert verify.measured > 0
    assert later.measured > 0


@pytest.mark.parametrize(
    ("at_most", "measured", "met"),
    [(False, 2.0, True), (False, 1.9, False), (True, 2.0, True), (True, 2.1, False)],
)
def test_a_bar_is_met_from_its_target_on(at_most, measured, met):
    assert Bar("", 2.0, "times", at_most, measured).met is met


def test_the_command_writes_what_it_prints(bench, tmp_path, capsys):
    path = tmp_path / "bars.jsonl"
    threads = torch.get_num_threads()
    arguments = ["--bars", "--only", "over", "--only", "merge", "--json", str(path)]
    assert run_kernels.main([*arguments, "--budget", "0.01"]) == 0
    assert torch.get_num_threads() == threads
    run, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert run["kind"] == "run"
    assert [row["unit"] for row in rows] == ["times", "share", "us"]
    printed = capsys.readouterr().out.splitlines()[1:]
    for row, line in zip(rows, printed, strict=True):
        assert row["kind"] == "bar"
        assert line.startswith("met" if row["met"] else "MISSED")
        assert row["name"] in line
