"""The analytic model, on data whose answer is known."""

import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from specattn.cli import app
from specattn.planning import (
    MACHINES,
    METHOD_PROFILES,
    MODELS,
    Link,
    Machine,
    ModelShape,
    Workload,
    checks,
    method_profile,
    pass_time,
    predict,
)
from specattn.planning.acceptance import constant_rate
from specattn.planning.rounds import poss_round, tokenswift_round, vegas_round
from specattn.planning.validate import errors

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
OPS = ("hybrid_tree_attention", "sparse_gather_attention", "select_topk", "linear")
# A terabyte per second, no limit of arithmetic, no host: everything is bytes.
BYTES_ALONE = Machine(
    "bytes", 1e12, 1e30, None, 0.0, True, dict.fromkeys(OPS, ((1, 1.0),)), "synthetic"
)


def synthetic(*rates, method="vegas"):
    return replace(METHOD_PROFILES[method], rates=rates)


SMALL = ModelShape("small", "llama", 2, 16, 4, 2, 8, 32, 100)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("qwen3-8b", 8.19),
        ("qwen3-30b-a3b", 30.5),
        ("gpt-oss-20b", 20.9),
        ("vicuna-7b", 6.74),
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.72),
        ("qwen3-4b", 4.02),
        ("llama-3.2-1b", 1.236),
        ("qwen3.5-0.8b", 0.752),
    ],
)
def test_models_have_the_parameters_that_their_makers_state(name, billions):
    assert MODELS[name].weights_stored() / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_config_says_what_the_checkpoint_holds():
    shape = ModelShape.from_config(TINY)
    with safe_open(TINY / "model.safetensors", "pt") as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert shape.weights_stored() == pytest.approx(stored, rel=0.002)  # norms are not counted
    assert shape == MODELS["tiny"] == ModelShape.named("tiny")


def test_a_hybrid_s_config_says_what_the_checkpoint_holds():
    shape = ModelShape.from_config(TINY / "hybrid")
    with safe_open(TINY / "hybrid" / "model.safetensors", "pt") as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert shape.weights_stored() == pytest.approx(stored, rel=0.003)  # nor are convolutions
    assert (shape.state_layers, shape.full_layers) == (4, 2)
    # Behind a longer text only layers with keys take longer, and states take their share.
    plain, long = (pass_time(Workload(shape, BYTES_ALONE, context), 1) for context in (1000, 2000))
    assert long.attention - plain.attention < plain.attention
    longer = Workload(shape, BYTES_ALONE, 2000).stored - Workload(shape, BYTES_ALONE, 1000).stored
    assert longer == 2 * 2 * 2 * 2 * 64 * 1000
    states = 4 * 4 * 128 * 64 * 4
    assert Workload(shape, BYTES_ALONE, 0).stored == 2 * shape.weights_stored() + states


def test_a_package_without_the_checkout_says_that_it_has_no_embedded_target(monkeypatch):
    monkeypatch.delitem(MODELS, "tiny")
    with pytest.raises(ValueError, match="source checkout"):
        ModelShape.named("tiny")


def test_experts_are_read_as_tokens_touch_them():
    moe = MODELS["qwen3-30b-a3b"]
    assert moe.weights_read(1) == pytest.approx(moe.weights_per_token)
    everything = moe.weights_stored() - moe.head_weights  # the table of embeddings is no product
    assert moe.weights_read(1 << 14) == pytest.approx(everything)
    # By drawing experts instead of by formula.
    draw = random.Random(0)
    touched = [len({e for _ in range(16) for e in draw.sample(range(128), 8)}) for _ in range(300)]
    dense = moe.layers * moe.attention_weights + moe.head_weights
    experts = (moe.weights_read(16) - dense) / (moe.layers * moe.mlp_weights)
    assert experts == pytest.approx(sum(touched) / len(touched), rel=0.01)


def test_a_pass_by_hand():
    time = pass_time(Workload(SMALL, BYTES_ALONE, context=50, batch=3), rows=2)
    # 2 layers of q, o [16, 32], k, v [16, 16] and three [16, 32] of the MLP; a head [16, 100].
    weights = 2 * (2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 32) + 16 * 100
    assert time.weights == pytest.approx(2 * weights / 1e12)
    # Per request: q and out 2*4*8, lse 2*4, K and V of 52 tokens of 2*8, one length.
    attention = 2 * (2 * 2 * 4 * 8) + 4 * 2 * 4 + 2 * 2 * 52 * 2 * 8 + 4
    assert time.attention == pytest.approx(2 * 3 * attention / 1e12)
    assert time.total == pytest.approx(time.weights + time.attention)
    assert time.bound == "attention"


def test_sliding_layers_read_their_window_and_a_draft_its_selection():
    sliding = ModelShape("s", "llama", 2, 16, 4, 2, 8, 32, 100, window=10, sliding_layers=1)
    time = pass_time(Workload(sliding, BYTES_ALONE, context=1000), rows=1)
    full = pass_time(Workload(SMALL, BYTES_ALONE, context=1000), rows=1)
    window = pass_time(Workload(SMALL, BYTES_ALONE, context=10), rows=1)
    assert time.attention == pytest.approx((full.attention + window.attention) / 2)
    draft = pass_time(Workload(SMALL, BYTES_ALONE, context=1000), rows=1, selected=10)
    assert draft.attention == pytest.approx(window.attention)
    # Selecting more than there is reads what there is.
    everything = pass_time(Workload(SMALL, BYTES_ALONE, context=1000), rows=1, selected=5000)
    assert everything.attention == pytest.approx(full.attention)


def test_a_host_that_runs_ahead_is_hidden_and_one_that_does_not_is_added():
    ahead = BYTES_ALONE.with_layer_seconds(1.0)
    assert pass_time(Workload(SMALL, ahead, 50), 1).total == pytest.approx(2.0)
    assert pass_time(Workload(SMALL, ahead, 50), 1).bound == "host"
    assert pass_time(Workload(SMALL, ahead, 50, eager=False), 1).total < 1e-6
    behind = Machine("cpu", 1.0, 1e30, None, 1.0, False, BYTES_ALONE.shares, "synthetic")
    time = pass_time(Workload(SMALL, behind, 50), 1)
    assert time.total == pytest.approx(2.0 + time.weights + time.attention)


def test_tokens_per_round_are_what_drawing_gives():
    profile = synthetic(0.9, 0.5)
    draw = random.Random(0)
    total, rounds = 0, 20000
    for _ in range(rounds):
        accepted = 0
        while accepted < 4 and draw.random() < (0.9 if accepted == 0 else 0.5):
            accepted += 1
        total += 1 + accepted
    assert profile.tokens_per_round(4) == pytest.approx(total / rounds, rel=0.02)
    assert synthetic(1.0).tokens_per_round(7) == 8
    assert synthetic(0.0).tokens_per_round(7) == 1
    assert synthetic(constant_rate(6.13, 7)).tokens_per_round(7) == pytest.approx(7.13)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_speedups_follow_from_rounds_and_never_win_without_acceptance(machine):
    workload = Workload(MODELS["qwen3-8b"], machine, 32768, batch=2)
    found = predict(workload, METHOD_PROFILES)
    plain = next(one for one in found if one.method == "plain")
    for one in found:
        rate = one.tokens / one.round.total
        assert one.speedup == pytest.approx(rate * plain.round.total)
        assert (one.speedup > 1) == (one.tokens > one.break_even)
    assert [one.speedup for one in found] == sorted((one.speedup for one in found), reverse=True)
    assert {one.method for one in found} == {"plain", *METHOD_PROFILES}
    nothing = {method: synthetic(0.0, method=method) for method in METHOD_PROFILES}
    assert predict(workload, nothing)[0].method == "plain"


def test_rounds_of_trees_by_hand():
    """Everything is bytes: what a round reads and writes, each time that it does."""
    workload = Workload(SMALL, BYTES_ALONE, context=100)
    layer = 2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 32

    def attention(rows, keys):  # K and V of 2 heads of 8; q and out of 4 heads, lse, a length
        return 2 * (2 * rows * 4 * 8 + 2 * (keys + rows) * 2 * 8) + 4 * rows * 4 + 4

    verify = 2 * (2 * layer + 16 * 100) + 2 * attention(20, 100)
    drafts = sum(2 * (2 * 16 * 16 + layer + 16 * 100) + attention(rows, 30) for rows in (1, 4, 4))
    found = poss_round(workload, depth=3, total_tokens=20, width=4, window=30)
    assert found.total == pytest.approx((drafts + verify) / 1e12)

    # A root, 1 and 3 guesses, and 2 continuations of 3 tokens; one of two heads' products.
    nodes = 1 + 1 + 3 + 2 * 3
    found = tokenswift_round(workload, widths=[1, 3], k=2, n=4, budget=40)
    heads = 2 * (16 * 16 + 16 * 100)
    draft = pass_time(workload, 1, selected=40).total
    verify = pass_time(workload, nodes).total
    assert found.total == pytest.approx(draft + heads / 1e12 + verify)
    chain = tokenswift_round(workload, widths=[1], k=0, n=4, budget=40)
    assert chain.total == pytest.approx(draft + pass_time(workload, 2).total)


def test_sparse_drafts_win_where_attention_is_all_and_lose_where_weights_are():
    perfect = {"vegas": synthetic(1.0)}
    far = predict(Workload(SMALL, BYTES_ALONE, 1_000_000), perfect)
    assert far[0].method == "vegas"
    assert 8 < far[0].speedup < 1 / 0.07
    near = predict(Workload(MODELS["qwen3-8b"], BYTES_ALONE, 300), perfect)
    assert near[-1].method == "vegas" or near[-1].speedup < 1.01


def _result(path, factor=1.0):
    """Rows that a machine of 40 GB/s would give whose attention attains half of it."""
    rows = []
    for context in (4096, 32768):
        for count in (1, 16):
            sizes = 2 * context * 2 * 64 * 2
            moved = sizes + 2 * count * 8 * 64 * 2
            seconds = moved / 40e9 / (0.5 if count == 1 else 0.25)
            wrong = factor if context == 4096 else 1.0
            rows.append(
                {
                    "kind": "row",
                    "op": "hybrid_tree_attention",
                    "variant": "contiguous",
                    "shape": "tiny",
                    "dtype": "bf16",
                    "context": context,
                    "rows": count,
                    "page_size": 0,
                    "bytes_read": sizes,
                    "bytes_written": moved - sizes,
                    "operations": 4 * count * 8 * context * 64,
                    "bounds": {"memory": moved / 40e9, "matrix": 0.0, "call": 1e-6},
                    "time": {"median": wrong * seconds},
                }
            )
    # Every call also pays 20 microseconds for its start, which a merge shows.
    for row in rows:
        row["time"]["median"] += 20e-6
    start = {**rows[0], "op": "merge_state", "context": 0, "time": {"median": 20e-6}}
    rows.append(start)
    run = {
        "kind": "run",
        "schema": 2,
        "machine": {"name": "synthetic", "device": "cpu"},
        "commit": "0",
        "ceilings": {
            "bandwidth": 40e9,
            "matrix": {"bf16": 1e15},
            "linear": {"bf16": {"1": 20e9, "64": 20e9}},
        },
    }
    path.write_text("\n".join(map(json.dumps, [run, *rows])))
    return path


def test_a_machine_is_read_from_its_results_and_predicts_them(tmp_path):
    machine = Machine.from_results(_result(tmp_path / "rows.jsonl"))
    assert machine.bandwidth == 40e9
    assert machine.share("hybrid_tree_attention", 4) == 0.5
    assert machine.share("hybrid_tree_attention", 64) == 0.25
    assert 0.25 < machine.share("hybrid_tree_attention", 16) < 0.5
    assert machine.share("linear", 16) == pytest.approx(0.5)
    found = checks(tmp_path / "rows.jsonl", machine)
    assert sorted(one.calibrated for one in found) == [False, False, True, True]
    assert max(abs(one.error) for one in found) < 1e-9
    # What was slower than the calibrated context says shows up as an error of that size.
    found = checks(_result(tmp_path / "slow.jsonl", factor=1.25), machine)
    median, worst = errors(found)
    assert worst == pytest.approx(0.2, rel=0.2)
    assert machine.cold_seconds == 20e-6


@pytest.mark.parametrize("said", ["tiny", "tiny cut to 2 layers", "a shape of its own"])
def test_passes_calibrate_the_host_on_one_row_and_are_held_to_the_rest(tmp_path, said):
    machine = Machine.from_results(_result(tmp_path / "rows.jsonl"))
    layers = 2 if "cut" in said else MODELS["tiny"].layers
    model, described = replace(MODELS["tiny"], layers=layers), {"layers": layers}
    if said == "a shape of its own":
        model = replace(model, hidden=512)
        described = {"shape": asdict(model)}
    true = machine.with_layer_seconds(1e-3)
    cases = {("plain step", 1024): 1, ("plain step", 8192): 1, ("verify", 8192): 7}
    rows = [
        {
            "kind": "pass",
            "name": name,
            "model": said,
            "context": context,
            "rows": count,
            "time": {"median": pass_time(Workload(model, true, context), count).total},
        }
        for (name, context), count in cases.items()
    ]
    # A decode loop is warmer than a pass by itself, and acceptance costs as much as a layer.
    warm = machine.with_layer_seconds(4e-4)
    for context in (1024, 8192):
        seconds = pass_time(Workload(model, warm, context), 1).total + 4e-4
        rows.append(
            {
                "kind": "row",
                "method": "plain",
                "settings": {},
                "model": said,
                "context": context,
                "batch": 1,
                "temperature": 0.0,
                "tau": 1.0,
                "fault": None,
                "tokens_per_second": {"median": 1 / seconds},
            }
        )
    path = tmp_path / "decoding.jsonl"
    run = {"kind": "run", "model": described}
    path.write_text("\n".join(map(json.dumps, [run, *rows])))
    found = checks(path, machine)
    assert [one.calibrated for one in found] == [True, False, False, True, False]
    assert errors(found)[1] < 1e-6


def test_what_sized_itself_is_held_to_what_it_drafted(tmp_path):
    """Vegas with three drafted tokens a round, six in half of them; two thirds survived."""
    machine = Machine.from_results(_result(tmp_path / "rows.jsonl")).with_layer_seconds(0.0)
    workload = Workload(MODELS["tiny"], machine, 8192)
    draft = vegas_round(workload, 6, 0.07, 256).draft / 2
    seconds = draft + pass_time(workload, 4, collect=True).total
    row = {"kind": "row", "settings": {}, "model": "tiny", "context": 8192, "batch": 1}
    row |= {"temperature": 0.0, "fault": None, "rounds": 10}
    step = pass_time(workload, 1).total
    plain = row | {"method": "plain", "tau": 1.0, "tokens_per_second": {"median": 1 / step}}
    vegas = row | {"method": "vegas", "tau": 3.0, "tokens_per_second": {"median": 3 / seconds}}
    vegas |= {"acceptance_rate": 2 / 3, "details": {"rounds without a draft": 5}}
    path = tmp_path / "sized.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"kind": "run", "model": {}}, plain, vegas])))
    assert [abs(one.error) < 1e-6 for one in checks(path, machine)] == [True, True]
    # The same row with a size of its own was one of as many drafts as that, in every round.
    fixed = vegas | {"settings": {"gamma": 6}}
    path.write_text("\n".join(map(json.dumps, [{"kind": "run", "model": {}}, plain, fixed])))
    whole = vegas_round(workload, 6, 0.07, 256).total
    assert checks(path, machine)[1].predicted == pytest.approx(3 / whole)


def test_a_file_of_several_models_is_held_to_the_sizes_of_each(tmp_path):
    machine = Machine.from_results(_result(tmp_path / "rows.jsonl")).with_layer_seconds(0.0)
    records = []
    for name, hidden in (("small", 256), ("large", 2048)):
        shape = replace(MODELS["tiny"], name=name, hidden=hidden)
        step = pass_time(Workload(shape, machine, 4096), 1).total
        row = {"kind": "row", "method": "plain", "settings": {}, "model": name, "context": 4096}
        row |= {"batch": 1, "temperature": 0.0, "fault": None, "tau": 1.0}
        records.append({"kind": "run", "model": {"name": name, "shape": asdict(shape)}})
        records.append(row | {"tokens_per_second": {"median": 1 / step}})
    path = tmp_path / "both.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    assert [abs(one.error) < 1e-9 for one in checks(path, machine)] == [True, True]


def test_products_of_a_cpu_are_calibrated_on_its_own_kernel(tmp_path):
    path = _result(tmp_path / "rows.jsonl")
    run, *rows = map(json.loads, path.read_text().splitlines())
    for name, moved, attained in (("output", 1e6, 0.5), ("gate and up", 1e9, 0.8)):
        seconds = moved / 40e9
        row = rows[0] | {"op": "linear_few_rows", "variant": name, "rows": 8, "context": 0}
        row |= {"bytes_read": moved, "bounds": {"memory": seconds, "matrix": 0.0}}
        rows.append(row | {"time": {"median": 20e-6 + seconds / attained}})
    path.write_text("\n".join(map(json.dumps, [run, *rows])))
    assert Machine.from_results(path).share("linear", 8) == pytest.approx(0.8)
    run["machine"]["device"] = "cuda"  # there the products are torch's
    path.write_text("\n".join(map(json.dumps, [run, *rows])))
    assert Machine.from_results(path).share("linear", 8) == pytest.approx(0.5)


def test_the_command_says_what_wins_and_why():
    arguments = [
        "plan",
        "--shape",
        "qwen3-8b",
        "--gpu",
        "h100",
        "--context",
        "131072",
        "--batch",
        "4",
    ]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert "PREDICTED, not measured" in outcome.output
    assert "DOES NOT FIT" in outcome.output
    for word in ("plain", "vegas", "longspec", "plain steps", "Acceptance of vegas"):
        assert word in outcome.output
    measured = CliRunner().invoke(app, [*arguments, "--acceptance", "vegas=0.1,0.05"])
    assert "given on the command line" in measured.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--shape", "gpt-9"], "--shape"),
        (["--gpu", "abacus"], "--gpu"),
        (["--dtype", "int4"], "--dtype"),
        (["--launch", "rocket"], "--launch"),
        (["--acceptance", "vegas=2"], "rates"),
        (["--acceptance", "magic=0.5"], "magic"),
        (["--validate", "/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_bad_options_are_named(arguments, named):
    outcome = CliRunner().invoke(app, ["plan", *arguments])
    assert outcome.exit_code == 2
    assert named in outcome.output


def test_acceptance_is_parsed_by_method():
    assert method_profile("longspec=0.8,0.7")["longspec"].rates == (0.8, 0.7)
    for text in ("vegas", "vegas=", "vegas=high"):
        with pytest.raises(ValueError, match="vegas|rates"):
            method_profile(text)


def test_ranks_share_the_cache_and_exchange_one_state_per_layer():
    model = MODELS["qwen3-8b"]
    link = Link("test", bandwidth=1e9, start=1e-3, source="")
    one = Workload(model, BYTES_ALONE, context=100_000, batch=2, eager=False)
    four = replace(one, ranks=4, link=link)
    alone, shared = pass_time(one, rows=7), pass_time(four, rows=7)
    assert shared.weights == alone.weights
    assert shared.attention == pytest.approx(alone.attention / 4, rel=1e-2)
    state = 2 * 7 * 32 * (128 * 2 + 4)  # requests, rows, heads, a state in bfloat16
    assert shared.exchange == pytest.approx(36 * (1e-3 + 3 * state / 1e9))
    assert shared.total == pytest.approx(shared.weights + shared.attention + shared.exchange)
    cache = 2 * 2 * 2 * 36 * 8 * 128 * 100_000
    assert one.stored - four.stored == pytest.approx(0.75 * cache)


def test_slow_links_are_the_bound_of_short_texts():
    slow = Link("test", bandwidth=1e3, start=1.0, source="")
    workload = Workload(SMALL, BYTES_ALONE, context=10, ranks=2, link=slow, eager=False)
    assert pass_time(workload, 1).bound == "exchange"
