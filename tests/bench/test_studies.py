"""Studies: their statistics against counting by hand, one small run of each, suites that exist."""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from scipy.stats import chisquare
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")

from decoding.columns import COLUMNS  # noqa: E402
from studies import (  # noqa: E402
    acceptance_spread,
    auto,
    between_passes,
    body,
    eight_bits,
    latents,
    papers,
    prefill,
    study,
    transformers_generate,
)
from tests.decoding.models import prompts, tiny_model  # noqa: E402
from tests.distributions import SIGNIFICANCE  # noqa: E402
from tests.drafters.poss_statement import random_drafter  # noqa: E402

from specattn.decoding import METHODS, Target  # noqa: E402
from specattn.decoding.engine.snapshot import PromptSnapshot  # noqa: E402
from specattn.decoding.passes.runner import KernelRunner, Runner  # noqa: E402
from specattn.planning import MODELS, PROFILES  # noqa: E402

SMALL = {"gamma": 3, "min_tokens": 8, "ratio": 0.1}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_noise_draws_from_the_distribution():
    scores = torch.randn(8, generator=torch.Generator().manual_seed(0))
    drawn = [
        acceptance_spread.PlacedNoise(0.7, seed)(torch.zeros(1, length), scores).argmax()
        for seed in range(20)
        for length in range(100)
    ]
    counts = torch.bincount(torch.stack(drawn), minlength=8)
    expected = (scores.double() / 0.7).softmax(-1) * len(drawn)
    assert chisquare(counts, expected).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_methods_continue_with_the_same_text(temperature):
    model = tiny_model(peak=4.0)
    target = acceptance_spread.CountingTarget(model, 1, 140)
    methods = [METHODS[name](**SMALL) for name in ("vegas", "streaming", "quest", "triforce")]
    drafter = random_drafter(model, dtype=torch.float32)
    methods.append(METHODS["poss"](drafter, depth=3, total_tokens=8))
    snapshot = PromptSnapshot(target, prompts([60]), readers=methods)
    found = [acceptance_spread.measure(snapshot, one, 16, temperature, seed=1) for one in methods]
    assert len({one["continuation"] for one in found}) == 1
    for one in found[:-1]:
        assert 1 <= one["tau"] <= one["drafting"] <= 4
    # Its 8 tokens and those of the chain before the step: 0 to 2.
    assert found[1]["read"] == pytest.approx(9.0, abs=0.3)
    assert found[-1]["read"] is None, "a trained drafter reads none of the target's cache"
    assert found[-1]["accepted_at"][0] <= found[-1]["offered_at"][0]


def test_acceptance_by_position_is_that_of_all_texts_together():
    found = [
        {"accepted_at": [3, 1], "offered_at": [4, 2]},
        {"accepted_at": [1], "offered_at": [4]},
    ]
    assert acceptance_spread.by_position(found) == "50.0% 50.0%"


def test_a_study_adds_to_its_file_and_measures_no_cell_twice(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    names = ("vegas:gamma=3,min_tokens=16", "streaming:gamma=3,min_tokens=16")
    methods = [word for name in names for word in ("--method", name)]
    small = ["--context", "64", "--new-tokens", "8", "--json", str(path), *methods]
    assert acceptance_spread.main([*small, "--texts", "1"]) == 0
    kept = path.read_text().splitlines()
    assert acceptance_spread.main([*small, "--texts", "2"]) == 0
    assert path.read_text().splitlines()[: len(kept)] == kept
    records = lines(path)
    assert [one["kind"] for one in records] == ["run", *["row"] * 4] * 2
    assert records[0]["schema"] == "specattn.acceptancespread/1"
    assert [(one["text"], one["method"]) for one in records[6:]] == [
        (1, name) for _ in range(2) for name in names
    ]
    printed = capsys.readouterr().out
    assert "64, T=1, 2 texts" in printed
    assert "2 of 2" in printed


def test_logits_over_eight_bits_are_held_against_those_of_the_models_own_type(tmp_path):
    path, sizes = tmp_path / "rows.jsonl", ["--context", "128", "--texts", "1"]
    assert eight_bits.main([*sizes, "--dtype", "float32", "--json", str(path)]) == 0
    found = {one["kv_dtype"]: one["kl"] for one in lines(path)[1:]}
    assert 0 < found["int8"] < found["fp8"] < found["fp8_e5m2"] < 0.1
    model, (prompt,) = tiny_model("qwen3"), prompts([30])
    own = eight_bits.logits(model, prompt, None).float()
    torch.testing.assert_close(own, model(prompt[None]).logits[0].detach(), rtol=1e-4, atol=1e-4)


def test_cells_of_auto_are_measured_and_added(tmp_path, capsys):
    file = tmp_path / "cells.jsonl"
    sizes = ["--context", "64", "--texts", "1", "--new-tokens", "8", "--repeats", "1"]
    sizes += ["--threads", str(torch.get_num_threads())]
    methods = ["--method", "plain", "--method", "auto", "--method", "suffix"]
    for heats in ("0", "1"):
        options = [*sizes, *methods, "--temperature", heats, "--json", str(file)]
        assert auto.main(options) == 0
    records = lines(file)
    assert [record["kind"] for record in records] == ["run", "cell", "run", "cell"]
    assert records[0]["new_tokens"] == 8
    assert [r["temperature"] for r in records if r["kind"] == "cell"] == [0.0, 1.0]
    assert all(set(r["speed"]) == {"plain", "auto", "suffix"} for r in records[1::2])
    assert capsys.readouterr().out.count("rounds of auto") == 2


def test_auto_is_held_against_the_best_of_the_others():
    cell = {"context": 64, "text": 0, "temperature": 0.0, "auto": "suffix 100%"}
    cell["speed"] = {"plain": 10.0, "auto": 18.0, "suffix": 20.0, "vegas": 12.0}
    shown = auto.Auto.row(None, cell)
    assert shown == ("64", "0", "0", "1.80", "0.90", "suffix", "suffix 100%")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "suffix"], "plain and auto must be among them"),
        (["--method", "magic"], "magic"),
    ],
)
def test_bad_options_are_refused(capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        auto.main(options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_every_way_decodes_the_text_of_sdpa_and_ratios_are_over_it(monkeypatch):
    monkeypatch.setattr(transformers_generate, "CHUNK", 16)
    options = argparse.Namespace(new_tokens=4, repeats=2, prefill=True)
    rows = transformers_generate.measure(tiny_model(), *prompts([40]), options)
    assert [row["way"] for row in rows] == list(transformers_generate.WAYS)
    assert all(row["same_text_as_sdpa"] for row in rows)
    assert all(row["seconds_per_token"]["median"] > 0 for row in rows)
    assert rows[0]["over_sdpa"] == {"decoding": 1, "prefill": 1}
    study = transformers_generate.TransformersGenerate(options)
    assert len(study.table(rows).splitlines()) == 1 + len(rows)


def test_a_model_with_latents_is_timed_beside_transformers(monkeypatch, tmp_path):
    small = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "kv_lora_rank": 16}
    small |= {"moe_intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    small |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    monkeypatch.setattr(latents, "LITE", latents.LITE | small)
    path, sizes = tmp_path / "rows.jsonl", ["--context", "40", "--new-tokens", "4"]
    sizes += ["--threads", str(torch.get_num_threads()), "--layers", "2"]
    assert latents.main([*sizes, "--repeats", "2", "--json", str(path)]) == 0
    run, row = lines(path)
    assert run["schema"] == "specattn.latents/1"
    assert row["same_text"]
    assert row["times"] > 0
    assert row["cache_bytes"] == 2 * 44 * 24 * 4
    assert row["copied_bytes"] == 2 * 2 * 16 * 16 * 4


@pytest.mark.parametrize("paper", papers.SUITES)
def test_suites_name_methods_and_tables_that_exist(paper):
    found = papers.suite(paper, papers.Scale(64, 256))
    assert len({section.name for section in found}) == len(found)
    for section in found:
        assert section.groups or section.note, section.name
        assert set(section.columns) <= COLUMNS.keys()
        for row in section.theirs:
            assert 1 < len(row) <= len(section.columns) + 1, section.name
        for entry in (one for group in section.groups for one in group.entries):
            assert entry.name in {*METHODS, "transformers"}
            if entry.name in METHODS:
                entry.build({})


def test_a_suite_takes_the_drafters_that_were_given():
    given = tuple(papers.Entry("poss", {"drafter": name}) for name in ("a", "b"))
    scale = papers.Scale(512, 4096, given)
    table, _, sweep, _, depth = papers.suite("poss", scale)[:5]
    assert [one.label for one in table.groups[0].entries[2:]] == [
        "poss drafter=a",
        "poss drafter=b",
    ]
    assert sweep.groups[0].entries[1].label == "poss total_tokens=60 drafter=a depth=6"
    assert [one.label for one in depth.groups[0].entries] == [
        "poss drafter=a depth=8",
        "poss drafter=b depth=8",
    ]


def test_a_papers_rows_are_laid_out_from_its_figures():
    scale = papers.Scale(64, 256)
    shown = {
        (paper, section.name): section.theirs
        for paper in ("longspec", "poss")
        for section in papers.suite(paper, scale)
    }
    assert ("LongSpec, QwQ-32B, AIME24", "3.82", "42.63", "2.25") in shown["longspec", "Table 3"]
    fifth = ("LC-7B, 0 to 5k", "116.65", "4.01", "8.91", "25.63", "6.18")
    assert shown["longspec", "Table 5"][0] == fifth
    mean = ("Llama-3-8B, EAGLE-2, mean of six data sets", "4.06", "2.68")
    assert shown["poss", "Table 1"][0] == mean
    swept = ("HASS, Llama-3-8B, depth=6 total_tokens=80", "0", "4.49", "2.83")
    assert shown["poss", "Tables 2 and 3"][1] == swept


def test_profiles_give_the_means_that_the_papers_print():
    """The package states them, the transcribed tables are the benchmark's."""
    vegas = papers.published("vegas", "Table 1")["1st Draft + Bonus"]
    longspec = papers.published("longspec", "Table 1")
    tokenswift = papers.published("tokenswift", "Table 3")["TokenSwift"]["4096"]["20K"]
    poss = papers.published("poss", "Table 1, tau")["Llama-3-8B"]["PosS-2"]
    printed = {
        "vegas-qwen3-8b": (7, vegas["Qwen3-8B"]["7"] + 1),
        "vegas-gpt-oss-20b": (7, vegas["gpt-oss-20b"]["7"] + 1),
        "longspec-llama-3.1-8b": (5, longspec["L-8B"]["LongSpec"]["LCC"][0]),
        "longspec-vicuna-7b": (5, longspec["V-7B"]["LongSpec"]["LCC"][0]),
        "tokenswift-llama-3.1-8b": (4, 4 * tokenswift[0] + 1),
        "poss-llama-3-8b": (6, poss[-1]),
    }
    assert printed.keys() == PROFILES.keys()
    for name, (depth, tokens) in printed.items():
        assert PROFILES[name].tokens_per_round(depth) == pytest.approx(tokens, abs=0.02), name


def test_printed_figures_agree_with_one_another():
    """What was copied from a table must be as consistent as the table."""
    checked = 0
    for rows in papers.published("longspec", "Table 1").values():
        for name, figures in rows.items():
            for data, (tau, speed, *speedup) in figures.items():
                assert (tau == 1) == name.startswith("Vanilla")
                for ratio in speedup:
                    assert speed / rows["Vanilla FA"][data][1] == pytest.approx(ratio, abs=0.012)
                    checked += 1
    assert checked == 5 * 4 * 5
    for table in ("Table 6", "Table 8"):
        for shares in papers.published("tokenswift", table).values():
            assert sum(shares[:4]) / 4 == pytest.approx(shares[4], abs=0.0151)
    for lengths in papers.published("tokenswift", "Table 4").values():
        for _, speedup, plain, swift in lengths.values():
            assert plain / swift == pytest.approx(speedup, rel=0.015)  # of minutes to one digit
    ours = papers.published("tokenswift", "Table 7")["[1,3,3,3]"]
    assert ours == papers.published("tokenswift", "Table 5")["Dynamic Partial Cache"]
    table_6 = papers.published("tokenswift", "Table 6")
    assert table_6["min-p, penalty"][:5] == papers.published("tokenswift", "Table 8")["1.2"]
    assert table_6["min-p"][:5] == papers.published("tokenswift", "Table 8")["1.0"]


def test_passes_of_a_body_are_timed_by_rows_replayed_and_by_modules(tmp_path):
    path = tmp_path / "body.jsonl"
    given = "--shape tiny --layers 1 --dtype float32 --context 32 --rows 1,5 --compile auto,off"
    command = [*given.split(), "--batch", "2", "--budget", "0.01", "--json", str(path)]
    for _ in range(2):  # the second measures nothing again
        assert study.run(body.Body, command) == 0
    run, *rows = lines(path)
    assert (run["shape"], run["layers"], run["machine"]["device"]) == ("tiny", 1, "cpu")
    assert [(one["compile"], one["rows"]) for one in rows] == [
        ("auto", 1), ("auto", 5), ("off", 1), ("off", 5),
    ]  # fmt: skip
    assert [one["how"] for one in rows] == [KernelRunner.how] * 2 + [Runner.how] * 2
    keys = rows[1]["bytes"] - rows[0]["bytes"]  # of four rows more of two requests
    assert keys > 0
    assert rows[0]["bytes"] > 33 / 4 * keys
    assert all(one["time"]["samples"] >= 5 for one in rows)
    for one, of_one in zip(rows, (rows[0], rows[0], rows[2], rows[2]), strict=True):
        assert one["queued"]["samples"] >= 3
        for time, over in (("time", "over_one_row"), ("queued", "queued_over_one_row")):
            assert one[over] == pytest.approx(one[time]["median"] / of_one[time]["median"])
        assert one["graph_bytes"] is None  # of a CPU


def test_queued_passes_are_timed_by_the_call():
    calls = []
    body.repeated(lambda: calls.append(1))
    assert len(calls) == body.QUEUED


def test_a_pass_of_a_file_without_queued_ones_is_shown_too():
    known = {"quantize": None, "kv_dtype": None, "context": 512, "batch": 1, "rows": 8, "how": "x"}
    time = {"median": 0.005, "spread": 0.1, "samples": 5}
    known |= {"time": time, "bandwidth": 2e12, "over_one_row": 1.0, "launches": 300}
    names = [name for name, _ in body.Body.header]
    shown = dict(zip(names, body.Body.row(None, known), strict=True))
    assert (shown["ms"], shown["queued, ms"], shown["graphs, MB"]) == ("5.00", "-", "-")
    later = {"queued": time | {"median": 0.0045}, "queued_over_one_row": 1.03}
    later["graph_bytes"] = 345_000_000
    shown = dict(zip(names, body.Body.row(None, known | later), strict=True))
    assert shown["queued, ms"] == "4.50"
    assert (shown["queued, over one row"], shown["graphs, MB"]) == ("1.03", "345")


def test_rounds_around_passes_that_return_at_once_are_timed(tmp_path, monkeypatch):
    run_at_all, path = [], tmp_path / "between.jsonl"
    verify = Target.verify
    monkeypatch.setattr(Target, "verify", lambda *a, **k: run_at_all.append(1) or verify(*a, **k))
    given = "--shape tiny --layers 1 --dtype float32 --new-tokens 8 --repeats 2 --batch 2 --json"
    assert study.run(between_passes.BetweenPasses, [*given.split(), str(path)]) == 0
    run, *rows = lines(path)
    assert (run["shape"], run["layers"], run["new_tokens"]) == ("tiny", 1, 8)
    assert [(one["method"], one["batch"], one["temperature"]) for one in rows] == [
        ("plain", 2, 0.0), ("plain", 2, 1.0),
    ]  # fmt: skip
    assert all(one["time"]["samples"] == 2 and one["cpu_seconds"] > 0 for one in rows)
    assert len(run_at_all) < 2 * 8  # of three runs of eight rounds in each cell


class Refuses(ModuleType):
    """FlashAttention 2 that was not built for the machine."""

    def flash_attn_func(self, *given, **how):
        raise RuntimeError("no kernel image is available")


class Reads(ModuleType):
    """One that reads prompts, as torch does."""

    calls = 0

    def flash_attn_func(self, q, k, v, *, softmax_scale, causal):
        Reads.calls += 1
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        how = {"attn_mask": seen, "scale": softmax_scale, "enable_gqa": True}
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)


class Installed(prefill.Prefill):
    """Prompts where two libraries are installed."""

    def __init__(self, options):
        super().__init__(options)
        self.libraries = {"flash-attn 2": Reads("reads"), "flash-attn 3": Refuses("refuses")}


def test_prompts_are_timed_by_each_attention_and_by_modules(tmp_path):
    path = tmp_path / "prefill.jsonl"
    given = "--shape tiny --layers 2 --dtype float32 --context 40,72 --budget 0.01 --json"
    with pytest.warns(UserWarning, match="flash-attn 3 of .*: RuntimeError: no kernel image"):
        assert study.run(Installed, [*given.split(), str(path)]) == 0
    assert study.run(prefill.Prefill, [*given.split(), str(path)]) == 0  # nothing again
    run, *rows = lines(path)
    assert (run["shape"], run["layers"], run["dtype"]) == ("tiny", 2, "float32")
    ways = ["ours", "flash-attn 2", "flash-attn 3", "modules"]
    assert [(one["context"], one["attention"]) for one in rows] == [
        (n, w) for n in (40, 72) for w in ways
    ]
    assert [one["refused"] for one in rows] == [False, False, True, False] * 2
    assert [one["how"] for one in rows] == [*[KernelRunner.how] * 3, Runner.how] * 2
    assert Reads.calls > 2 * 2 * 5
    tiny = MODELS["tiny"]
    weights = 2 * (tiny.mlp_weights + tiny.attention_weights)
    scores = 2 * tiny.q_heads * tiny.head_dim * 40 * 41 // 2
    assert rows[0]["operations"] == 2 * 40 * weights + 4 * scores
    assert all(one["time"]["samples"] >= 5 for one in rows)
    assert rows[0]["over_ours"] == 1.0


def test_a_body_needs_the_gpu_that_it_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        study.run(body.Body, ["--device", "cuda", "--shape", "tiny"])
    assert "--device cuda: there is no GPU" in capsys.readouterr().err
