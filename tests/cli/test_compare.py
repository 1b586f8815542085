"""``specattn compare`` as a user types it."""

import json
import os
import re
import signal
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from specattn.reference import add_gumbel_noise
from transformers import AutoModelForCausalLM

from specattn import cli
from specattn.cli import run_state
from specattn.cli.session import DecodingSession
from specattn.decoding import Plain, generate
from specattn.planning import MODELS, ModelShape
from specattn.widening import widened_target
from tests.cli.conftest import TINY
from tests.cli.test_generate import broken
from tests.decoding.rounding_ties import Recording


def with_fourth_token(token, before=None):
    """Return a `decode` whose fourth token is another one, for all methods but plain."""
    decode = DecodingSession.decode

    def parted(self, method, runs, **options):
        found = decode(self, method, runs, **options)
        if method != Plain():
            if before is not None:
                before.extend(self.prompts[0].tokens + found.texts[0].tokens[:3])
            found.texts[0].tokens[3] = token
        return found

    return parted


def test_every_method_has_a_line_and_options_of_its_own(specattn, prompt, drafter, columns):
    """On 80 columns; nothing is cut."""
    columns("stderr", 80)
    methods = (
        "plain,vegas,vegas:switch=false,streaming,quest,specextend,longspec:widths=[2,2,2],poss,"
        f"medusa,prompt_lookup,token_recycling:nodes=40,depth=4,longspec:gamma=3,drafter={drafter}"
    )
    given = ("compare", "--prompt-file", prompt, "--max-new-tokens", 6, "--methods", methods)
    code, _, said = specattn(*given)
    assert code == 0
    assert "identical, token for token: yes" in said
    begin, end = said.index("method "), said.index("\n#3 is vegas:switch=false\n")
    table = said[begin:end].splitlines()
    assert [line.split("  ")[0] for line in table[1:]] == [
        "plain", "vegas", "vegas #3", "streaming", "quest", "specextend", "longspec #7",
        "poss", "medusa", "prompt_lookup", "token_recycling #11", "longspec #12",
    ]  # fmt: skip
    assert all(len(line) == len(table[0]) <= 80 for line in table)
    assert f"\n#12 is longspec:gamma=3,drafter={drafter}\n" in said
    assert "\u2026" not in said
    assert table[0].split("  ")[-2].strip() == "accepted", "passes and new tokens have no room"
    assert "draft/target/accept" not in said


def test_a_narrow_table_leaves_columns_out(specattn, prompt, columns, monkeypatch):
    """No line of it is broken; speed-ups stand beside the seconds of the whole run.

    A file gets all of them: COLUMNS may be what pytest itself exported.
    """
    given = ("compare", "--prompt-file", prompt, "--max-new-tokens", 6)
    methods = ("--methods", "plain,suffix,vegas:gamma=4,ratio=0.5")
    heads = {}
    monkeypatch.setenv("COLUMNS", "45")
    for width in (None, 45, 60, 200):
        if width:
            columns("stderr", width)
        code, _, said = specattn(*given, *methods)
        assert code == 0
        table = said[said.index("method ") :].splitlines()[:4]
        assert len({len(line) for line in table}) == 1
        assert len(table[0]) <= (width or 200)
        heads[width] = table[0].split()
        assert said.count("\n#3 is vegas:gamma=4,ratio=0.5\n") == (width in (45, 60))
        for name in heads[width]:
            assert f"{name}: " in said or name in ("method", "per", "pass", "speed-up")
    assert heads[45] == ["method", "tokens/s", "speed-up", "total"]
    assert heads[60] == [*heads[45], "per", "pass", "accepted"]
    assert heads[200] == [*heads[45], "new", "passes", "per", "pass", "accepted", "prefill"]
    assert heads[None] == heads[200]


def test_the_total_is_the_time_of_prompt_and_text(written):
    content, _, said = written("compare", "--methods", "plain,suffix", "--max-new-tokens", 6)
    for run in content["runs"]:
        found = run["statistics"]
        seconds = found["prefill_seconds"] + found["decode_seconds"]
        line = re.search(rf"^{run['method']['name']} +\d.*$", said, re.MULTILINE)[0]
        assert f" {seconds:.2f} s " in line


def test_who_drafts_nothing_says_why(specattn, prompt, monkeypatch):
    def said(method, count=2):
        given = ("compare", "--prompt-file", prompt, "--max-new-tokens", count)
        lines = specattn(*given, "--methods", f"plain,{method}")[2].splitlines()
        return [line for line in lines if "drafted nothing" in line]

    assert said("vegas") == ["vegas drafted nothing: 2 passes did not tell yet whether drafts pay"]
    why = "in 1 pass there was nothing to draft from, or no room for a draft"
    assert said("vegas:gamma=2", 1) == [f"vegas:gamma=2 drafted nothing: {why}"]
    assert said("vegas:gamma=2", 8) == []
    decode = DecodingSession.decode

    def chose_none(self, method, runs, **options):
        found = decode(self, method, runs, **options)
        found.statistics.details["last choice"] = "no draft: plain decoding 1 in 2.5 ms"
        return found

    monkeypatch.setattr(DecodingSession, "decode", chose_none)
    why = "no draft was expected to pay, by what passes took (plain decoding 1 in 2.5 ms)"
    assert said("vegas") == [f"vegas drafted nothing: {why}"]


def test_sampling_that_is_not_the_usual_one_is_said(specattn, prompt):
    """As the demo's repetition penalty."""
    given = ("compare", "--methods", "plain", "--prompt-file", prompt, "--max-new-tokens", 2)
    assert "prompt tokens of prompt.py\n" in specattn(*given)[2]
    said = specattn(*given, "--repetition-penalty", 1.2, "--top-k", 5)[2]
    assert "prompt tokens of prompt.py; top k 5; repetition penalty 1.2\n" in said


def test_texts_that_are_alike_are_shown_once(specattn, prompt, monkeypatch):
    """And the one that is not beside them."""
    given = ("compare", "--prompt-file", prompt, "--max-new-tokens", 6)
    one = specattn(*given, "--method", "plain")[1]
    methods = ("--method", "plain", "--method", "vegas:gamma=2,ratio=0.5", "--explain")
    code, shown, said = specattn(*given, *methods)
    assert (code, shown) == (0, one)
    assert "The same text, shown once: plain, vegas:gamma=2,ratio=0.5\n" in said
    assert said.count("draft/target/accept: ") == 2
    monkeypatch.setattr(DecodingSession, "decode", with_fourth_token(4000))
    code, shown, said = specattn(*given, "--methods", "plain,prompt_lookup,medusa")
    assert code == 0
    assert shown.startswith(one)
    assert len(shown) > len(one)
    assert "The same text, shown once: prompt_lookup, medusa\n" in said


@pytest.mark.parametrize("option", ["--method", "--methods"])
def test_the_option_that_is_wrong_is_named(refused, prompt, option):
    reason = "specattn: error: --method: gamma must be at least 1"
    refused(reason, "compare", "--prompt-file", prompt, option, "plain,vegas:gamma=0")


def test_the_demo_is_a_comparison(specattn, prompt, refused, columns):
    """Of one text, shown once, with a line for each method, by its name where nothing has room."""
    columns("stderr", 40)
    code, text, said = specattn("demo", prompt, "--max-new-tokens", 4)
    assert code == 0
    assert text.endswith("specattn generate -h\n")
    assert "The same text, shown once: plain, auto, suffix\n" in said
    rows = re.findall(r"^(?:plain|auto|suffix)  .* s$", said, re.MULTILINE)
    assert len(rows) == 3
    assert not re.search(r"^plain \d", said, re.MULTILINE)
    refused("FILE: nowhere is not a file", "demo", "nowhere")
    refused("--max-new-tokens", "demo", prompt, "--max-new-tokens", 2**31)


def test_the_demo_of_a_real_body_makes_it_once(specattn, prompt, refused, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    deeper = replace(MODELS["tiny"], name="deeper", layers=MODELS["tiny"].layers + 1)
    monkeypatch.setitem(MODELS, "deeper", deeper)
    line = ("demo", prompt, "--max-new-tokens", 4, "--wide", "deeper")
    code, _, said = specattn(*line)
    assert code == 0
    assert f"in the sizes of deeper, the same text and drafts: {tmp_path / 'wide/deeper'}" in said
    assert ModelShape.from_config(tmp_path / "wide/deeper").layers == deeper.layers
    made = (tmp_path / "wide/deeper/config.json").stat()
    assert widened_target("deeper", tmp_path / "wide") == tmp_path / "wide/deeper"
    assert (tmp_path / "wide/deeper/config.json").stat() == made
    refused("--wide: expected one of", "demo", prompt, "--wide", "qwen3-30b-a3b")


@pytest.mark.parametrize("when", ["before its first token", "in its text"])
def test_an_interrupted_comparison_judges_nothing(specattn, prompt, tmp_path, monkeypatch, when):
    """Ctrl-C in the second of three methods."""
    out, calls = tmp_path / "out.json", []
    name, at = ("extend", 10) if when == "in its text" else ("__post_init__", 2)
    original = getattr(run_state.RunState, name)

    def interrupted(self, *arguments):
        original(self, *arguments)
        calls.append(name)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_state.RunState, name, interrupted)
    code, _, said = specattn(
        "compare", "--prompt-file", prompt, "--max-new-tokens", 8, "--json", out,
        "--methods", "plain,prompt_lookup:gamma=1,medusa",
    )  # fmt: skip
    assert code == 130
    assert "identical" not in said
    assert "\nplain " in said
    assert "medusa" not in said
    written = json.loads(out.read_text())
    assert written["identical"] is None
    lengths = [len(run["tokens"]) for run in written["runs"]]
    assert lengths[0] == 8
    assert len(lengths) == (2 if when == "in its text" else 1)
    assert f"Interrupted; {len(lengths)} of 3 methods have run." in said


def test_json_has_every_run(specattn, prompt):
    options = ("--prompt-file", prompt, "--max-new-tokens", 5, "--methods", "plain,vegas:gamma=2")
    code, text, said = specattn("compare", *options, "--json", "-")
    assert code == 0
    written = json.loads(text)
    assert (written["schema"], written["identical"]) == ("specattn.compare/1", True)
    plain, vegas = written["runs"]
    assert (plain["method"]["name"], vegas["method"]["gamma"]) == ("plain", 2)
    assert plain["tokens"] == vegas["tokens"]
    assert plain["statistics"]["new_tokens"] == 5
    assert "\nplain " in said


@pytest.mark.parametrize(
    ("dtype", "tied", "penalty"),
    [  # half of them have every pair
        pytest.param(*case, marks=pytest.mark.slow if number.bit_count() % 2 else ())
        for number, case in enumerate(product(("fp32", "bf16"), (False, True), (1.0, 1.3)))
    ],
)
def test_where_texts_part_is_explained(
    specattn, prompt, tmp_path, monkeypatch, dtype, tied, penalty
):
    """The second method's fourth token is made to be another one.

    It has the very same logit where the target's head has the same row for both.
    """
    out = tmp_path / "out.json"
    given = ("compare", "--prompt-file", prompt, "--max-new-tokens", 6, "--json", out)
    given += ("--dtype", dtype, "--penalty", penalty)
    assert specattn(*given, "--methods", "plain")[0] == 0
    plain = json.loads(out.read_text())["runs"][0]["tokens"]
    usual, other = plain[3], 4000
    assert other not in plain
    model = TINY
    if tied:
        # A twin that comes later in the vocabulary: the greedy choice is still the first.
        model = broken(
            tmp_path / "model",
            lambda weights: weights["model.embed_tokens.weight"][other].copy_(
                weights["model.embed_tokens.weight"][usual]
            ),
        )
    monkeypatch.setattr(DecodingSession, "decode", with_fourth_token(other))
    code, _, said = specattn(*given, "--model", model, "--methods", "plain,prompt_lookup")
    assert code == 0
    assert "Outputs identical, token for token: no" in said
    assert "prompt_lookup parts from plain at new token 3: " in said
    assert ("apart: a near-tie" if tied else "apart: no near-tie") in said
    written = json.loads(out.read_text())
    assert written["identical"] is False
    assert written["runs"][0]["difference"] is None
    found = written["runs"][1]["difference"]
    assert (found["position"], found["tokens"]) == (3, [usual, other])
    assert found["near_tie"] is tied
    assert (found["gap"] <= found["bound"]) is tied


@pytest.mark.parametrize(
    ("kv_dtype", "twin", "tied"),
    [("fp8", True, True), ("int8", False, False), (None, True, False)],
)
def test_over_8_bits_the_rounding_of_a_key_may_have_decided(
    specattn, prompt, tmp_path, monkeypatch, kv_dtype, twin, tied
):
    """Between logits that lie no further apart than what 8 bits change in them."""
    out, model, other, before = tmp_path / "out.json", TINY, 4000, []
    given = ("compare", "--prompt-file", prompt, "--max-new-tokens", 6, "--json", out)
    given += () if kv_dtype is None else ("--kv-dtype", kv_dtype)
    assert specattn(*given, "--methods", "plain")[0] == 0
    usual = json.loads(out.read_text())["runs"][0]["tokens"][3]

    def make_twin(weights):  # hardly less likely, and by far more than float32 rounds
        rows = weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].float()
        rows[other].copy_(rows[usual] * 0.9999)

    if twin:
        model = broken(tmp_path / "model", make_twin)
    monkeypatch.setattr(DecodingSession, "decode", with_fourth_token(other, before))
    code, _, said = specattn(*given, "--model", model, "--methods", "plain,prompt_lookup")
    assert code == 0
    assert ("apart: a near-tie that the rounding of a key may have decided" in said) is tied
    assert ("apart: no near-tie" in said) is not tied
    eight_bits = kv_dtype is not None
    assert (f"what keys and values of {kv_dtype} change in logits" in said) is eight_bits
    found = json.loads(out.read_text())["runs"][1]["difference"]
    assert (found["position"], found["tokens"], found["near_tie"]) == (3, [usual, other], tied)
    recording = Recording()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    options = {"max_new_tokens": 1, "kv_dtype": kv_dtype, "logits_processor": [recording]}
    generate(loaded, [before], "plain", **options)
    logits = recording.scores[tuple(before)]
    assert found["gap"] == pytest.approx(float(logits[usual] - logits[other]), rel=1e-2)
    if eight_bits:
        with torch.no_grad():
            exact = loaded(torch.tensor([before])).logits[0, -1]
        changed = float((logits - exact).square().mean().sqrt())
        assert found["bound"] == pytest.approx(changed, rel=1e-2)


def test_a_seed_is_judged_above_temperature_0(specattn, prompt, tmp_path, monkeypatch):
    """But for drafts that are sampled by themselves, which make a text of their own."""
    out, rejecting = tmp_path / "out.json", "vegas:gamma=2,rejection=true"
    given = ("compare", "--prompt-file", prompt, "--max-new-tokens", 8, "--json", out)
    given += ("--temperature", 0.9, "--seed", 3)
    code, _, said = specattn(*given, "--methods", f"plain,vegas:gamma=2,{rejecting}")
    assert code == 0
    assert "Outputs identical, token for token: yes" in said
    assert f"Not judged, for drafts that are sampled by themselves: {rejecting}\n" in said
    written = json.loads(out.read_text())
    assert written["identical"] is True
    assert written["runs"][0]["tokens"] == written["runs"][1]["tokens"]
    code, _, said = specattn(*given, "--methods", f"plain,{rejecting}")
    assert "identical" not in said
    assert json.loads(out.read_text())["identical"] is None

    other, before = 4000, []
    monkeypatch.setattr(DecodingSession, "decode", with_fourth_token(other, before))
    code, _, said = specattn(*given, "--methods", "plain,prompt_lookup")
    assert "whose scores are" in said
    assert "apart: no near-tie" in said
    found = json.loads(out.read_text())["runs"][1]["difference"]
    assert (found["position"], found["tokens"][1]) == (3, other)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.tensor([before])).logits[:, -1].double() / 0.9
    drawn = add_gumbel_noise(scores, 3, torch.tensor([0]), torch.tensor([len(before)]))[0]
    assert int(drawn.argmax()) == found["tokens"][0]
    expected = (drawn[found["tokens"][0]] - drawn[other]).item()
    assert found["gap"] == pytest.approx(expected, rel=1e-4)


def test_methods_take_turns_there_and_back(specattn, prompt, monkeypatch):
    decode, order = DecodingSession.decode, []

    def noted(self, method, runs, **options):
        order.append(method.name)
        found = decode(self, method, runs, **options)
        found.statistics.draft_seconds = len(order)  # later runs are slower
        return found

    monkeypatch.setattr(DecodingSession, "decode", noted)
    given = ("compare", "--prompt-file", prompt, "--max-new-tokens", 4, "--json", "-")
    code, text, said = specattn(*given, "--methods", "plain,prompt_lookup,medusa", "--repeats", 3)
    assert code == 0
    there = ["plain", "prompt_lookup", "medusa"]
    assert order == [*there, *reversed(there), *there]
    for run in json.loads(text)["runs"]:
        speeds = run["tokens_per_second"]
        assert len(speeds) == 3
        assert run["statistics"]["tokens_per_second"] == sorted(speeds)[1]
    # Each text is shown once.
    assert specattn(*given[:-2], "--methods", "plain", "--repeats", 2)[1].count("\n") == len(
        specattn(*given[:-2], "--methods", "plain")[1].splitlines()
    )


@pytest.mark.parametrize(("share", "said"), [(1.0, "100%"), (0.25, "25%"), (0.05, ""), (None, "")])
def test_other_programs_are_noticed(written, monkeypatch, share, said):
    """In a line that a terminal of 80 columns has room for."""
    cores = None if share is None else share * os.cpu_count()
    monkeypatch.setattr(cli.compare, "Others", lambda: SimpleNamespace(cores=lambda: cores))
    content, _, messages = written("compare", "--method", "plain", "--max-new-tokens", 1)
    assert content["others_share"] == pytest.approx(share)
    lines = [line for line in messages.splitlines() if "other programs" in line]
    assert len(lines) == bool(said)
    assert all(f"other programs used {said} of" in line and len(line) < 80 for line in lines)
