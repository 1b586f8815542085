"""The parts of the decoding benchmark: figures against counting, simulation against its profile."""

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    DynamicCache,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from decoding import models, passes  # noqa: E402
from decoding.cases import UNSHAPED, Entry, Group, Shaping, grid  # noqa: E402
from decoding.columns import COLUMNS  # noqa: E402
from decoding.identity import Difference, explain, first_difference  # noqa: E402
from decoding.measure import MeasurePlan, _compare, measure  # noqa: E402
from decoding.rows import DecodeRow  # noqa: E402
from decoding.runs import Outcome, run, run_transformers  # noqa: E402
from decoding.sections import Section  # noqa: E402
from decoding.targets import bend  # noqa: E402
from decoding.texts import RandomTokens  # noqa: E402
from studies.papers import Scale, suite  # noqa: E402

from specattn import Tree  # noqa: E402
from specattn.acceptance import accept, accept_samples  # noqa: E402
from specattn.decoding import (  # noqa: E402
    ContextualPenalty,
    Medusa,
    Plain,
    RequestStatistics,
    Round,
    Statistics,
    Target,
    Vegas,
)
from specattn.decoding.engine.snapshot import PromptSnapshot  # noqa: E402
from specattn.drafters import MedusaHeads  # noqa: E402
from specattn.planning import AcceptanceProfile  # noqa: E402

CPU = torch.device("cpu")
SIGNIFICANCE = 1e-4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return models.random_weights("tiny", 2, torch.float32, CPU)


@pytest.fixture(scope="module")
def prompts():
    return RandomTokens(4096).prompts(0, 40, 3)


def test_figures_are_those_of_counting_every_round():
    """Rounds are (levels offered, tokens accepted), the first of each run without a draft."""
    runs = [
        ([(0, 0), (3, 3), (3, 1), (3, 0)], 2.0, 0.5),
        ([(0, 0), (3, 2), (2, 2), (3, 1)], 4.0, 1.5),
    ]
    outcomes = []
    for rounds, target_seconds, draft_seconds in runs:
        request = RequestStatistics(prompt_tokens=9)
        for depth, accepted in rounds:
            request.record(Round(depth, depth, accepted, [0] * (accepted + 1)))
        timed = Statistics([request], 1.0, draft_seconds, target_seconds, accept_seconds=0.1)
        timed.graph_bytes = len(outcomes) << 20
        outcomes.append(Outcome([], timed.tokens_per_second, timed, 1 << 30))
    group = Group(9, 1, 0.0, (Entry("vegas"),))
    row = DecodeRow(Entry("vegas"), group, outcomes, prefill_seconds=[0.25, 0.35])
    record = row.record()

    rounds = [one for run_rounds, _, _ in runs for one in run_rounds]
    emitted = sum(accepted + 1 for _, accepted in rounds)
    assert record["rounds"] == len(rounds)
    assert record["tau"] == pytest.approx(emitted / len(rounds))
    assert record["tau_without_bonus"] == pytest.approx(
        sum(accepted for _, accepted in rounds) / len(rounds)
    )
    assert record["acceptance_rate"] == pytest.approx(9 / 17)
    for place in range(3):
        reached = [one for one in rounds if one[1] > place]
        offered = [one for one in rounds if one[0] > place and one[1] >= place]
        assert record["per_position_acceptance"][place] == len(reached) / len(rounds)
        assert record["conditional_acceptance"][place] == len(reached) / len(offered)
    speeds = [8 / 2.6, 9 / 5.6]  # tokens: accepted and one more per round
    assert record["tokens_per_second"]["median"] == pytest.approx(sum(speeds) / 2)
    assert record["round_seconds"]["target"] == pytest.approx((2.0 / 4 + 4.0 / 4) / 2)
    assert record["round_seconds"]["total"] == pytest.approx((2.6 / 4 + 5.6 / 4) / 2)
    assert record["prefill_seconds"] == pytest.approx(0.3)
    assert record["peak_bytes"] == 1 << 30
    assert record["graph_bytes"] == 1 << 20
    assert COLUMNS["graphs"](record) == "1 MB"


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "tree",
    [
        Tree.chain(4),
        Tree.full([2, 3, 2]),
        Tree.stack(
            [Tree.full([2, 2]), Tree.chain(3), Tree.from_paths([(0, 0, 0), (0, 1), (1, 0)])]
        ),
    ],
    ids=["chain", "full", "batch"],
)
def test_bent_logits_accept_as_the_profile_says(tree, sampled):
    profile = AcceptanceProfile("p", (0.8, 0.6, 0.5), "test")
    generator = torch.Generator().manual_seed(5)
    batch, vocabulary, rounds = 3, 40, 700
    # Siblings carry different tokens, here even all nodes do.
    tokens = torch.stack([torch.randperm(vocabulary)[: tree.size] for _ in range(batch)])
    deepest = tree.depths.expand(batch, -1).max(1).values
    # All rounds are a batch of their own, one request's behind the other's.
    tokens = tokens.repeat_interleave(rounds, 0)
    if tree.batch_size:
        tree = Tree(tree.parents.repeat_interleave(rounds, 0))
    logits = torch.randn(batch * rounds, tree.size, vocabulary, generator=generator)
    bend(logits, tree, tokens, profile, generator)
    if sampled:
        # A flat draft distribution: each child may be tried, whatever the target says of it.
        flat = torch.full_like(logits, 1 / vocabulary)
        accepted = accept(tree, tokens, logits.softmax(-1), draft_probs=flat, generator=generator)
    else:
        accepted = accept_samples(tree, tokens, logits.argmax(-1))
    levels = torch.arange(tree.max_depth + 1)
    counts = (accepted.counts.view(batch, rounds, 1) == levels).sum(1).float()
    for request, depth in enumerate(deepest.tolist()):
        reached = [1.0]
        for level in range(1, depth + 1):
            reached.append(reached[-1] * profile.rate(level))
        expected = [a - b for a, b in pairwise([*reached, 0.0])]
        seen = counts[request, : depth + 1]
        assert seen.sum() == rounds
        assert chisquare(seen, rounds * torch.tensor(expected)).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_real_loop_accepts_as_the_profile_says(model, temperature):
    profile = AcceptanceProfile("p", (0.9, 0.6), "test")
    group = Group(
        24, 3, temperature, (Entry("vegas", {"gamma": 3, "min_tokens": 8, "switch": False}),)
    )
    texts = RandomTokens(4096)
    (row,) = measure(model, texts, group, MeasurePlan(160, 1, 2), profile, lambda name: None, {})
    assert row.fault is None
    offered, accepted = row.pooled.offered_at, row.pooled.accepted_at
    assert min(offered) > 100
    for level, (tried, kept) in enumerate(zip(offered, accepted, strict=True), start=1):
        rate = profile.rate(level)
        expected = [tried * rate, tried * (1 - rate)]
        assert chisquare([kept, tried - kept], expected).pvalue > SIGNIFICANCE
    assert row.prefill_seconds == []


def prefilled(model, prompts, **options):
    """Return the prompts with room for 30 tokens behind each."""
    return PromptSnapshot(Target(model, len(prompts), len(prompts[0]) + 30), prompts, **options)


def test_the_prompts_are_there_again_after_any_run(model, prompts):
    snapshot = prefilled(model, prompts)
    target, prefix = snapshot.target, snapshot.prefix
    before = target.cache.storage[:, :, :, :prefix].clone()
    lengths = target.cache.seqlens.tolist()
    for method in (Vegas(gamma=3, min_tokens=8), Plain()):
        outcome = run(snapshot, method, 12, 1.0, seed=3)
        assert [len(tokens) for tokens in outcome.tokens] == [12] * 3
    snapshot.restore()
    assert target.cache.seqlens.tolist() == lengths == [39] * 3
    assert torch.equal(target.cache.storage[:, :, :, :prefix], before)


def test_prompts_features_are_kept_for_methods_that_read_them(model, prompts):
    heads = MedusaHeads.for_target(model, target="tiny")
    with pytest.raises(ValueError, match="Medusa reads features: give it as a reader"):
        run(prefilled(model, prompts), Medusa(heads), 4, 0.0, seed=0)
    seen = []

    class Listening(Medusa):
        def start(self, context):
            drafter = super().start(context)
            drafter.on_prefill = lambda *chunk: seen.append(chunk)
            return drafter

    snapshot = prefilled(model, prompts, readers=[Medusa(heads)])
    run(snapshot, Listening(heads, widths=(2, 2)), 1, 0.0, seed=0)
    ids = torch.stack(prompts)[:, :-1]
    with torch.no_grad():
        features = model.base_model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(torch.cat([torch.stack(x) for _, x in seen], 1), features)


@torch.no_grad()
def test_the_peer_decodes_what_it_decodes_from_its_own_prefill(model, prompts):
    snapshot = prefilled(model, prompts)
    outcome = run_transformers(snapshot, 12, 0.0, seed=0)
    assert outcome.tokens_per_second > 0
    cache = DynamicCache(config=model.config)
    ids = torch.stack(prompts)
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert outcome.tokens == expected[:, 40:].tolist()
    assert run(snapshot, Plain(), 12, 0.0, seed=0).tokens == outcome.tokens


@torch.no_grad()
def test_a_difference_is_explained_by_plain_logits(model, prompts):
    prompt = prompts[0]
    plain = run(prefilled(model, prompts[:1]), Plain(), 8, 0.0, seed=0).tokens[0]
    other = [*plain[:5], (plain[5] + 1) % 4096, *plain[6:]]
    assert first_difference(plain, other) == 5
    assert first_difference(plain, plain[:3]) is None
    gap, noise = explain(partial(Target, model), prompt, plain, other, 5)
    text = torch.cat([prompt, torch.tensor(plain[:5])])[None]
    logits = model(text, use_cache=False).logits[0, -1]
    assert gap == pytest.approx((logits[plain[5]] - logits[other[5]]).item(), abs=1e-4)
    assert gap > 0
    assert noise < 1e-4
    assert not Difference(0, 0, 5, gap, noise).near_tie
    assert Difference(0, 0, 5, 1e-6, 1e-6).near_tie


def test_a_draft_by_fewer_bits_must_write_plain_decodings_text():
    """An engine with such weights is another model, ours are of the draft alone."""
    group = Group(9, 1, 0.0, ())

    def row(name, tokens, **options):
        timed = Outcome([tokens], 1.0, None, None)
        return DecodeRow(Entry(name, options), group, [timed])

    rows = [row("plain", [1, 2]), row("vegas", [1, 2], weights="int4")]
    rows.append(row("llama.cpp", [3, 2], weights="q8_0"))
    _compare(rows, None, [torch.arange(4)], 0, 1)
    assert [(one.compared, one.differences) for one in rows] == [(0, []), (1, []), (0, [])]


def test_bytes_of_a_pass_are_those_of_weights_and_cache():
    model = models.random_weights("llama-3.1-8b", None, torch.bfloat16, torch.device("meta"))
    embedding = 2 * 128256 * 4096
    weights = 2 * sum(p.numel() for p in model.parameters())
    assert passes.weight_bytes(model) == weights - embedding  # the head is a table of its own
    tiny = models.random_weights("tiny", 3, torch.bfloat16, CPU)
    assert passes.weight_bytes(tiny) == 2 * sum(p.numel() for p in tiny.parameters())
    assert passes.token_bytes(Target(tiny, 1, 4)) == 3 * 2 * 2 * 64 * 2


def test_a_round_is_its_drafts_its_selection_and_its_verification():
    seconds = {"plain step": 2.0, "draft step": 0.5, "select": 0.2}
    seconds |= {"verify": 2.6, "verify, scores": 2.8}
    assert passes.round_cost(seconds, gamma=6) == pytest.approx(3.0)
    seconds |= {"verify, each row": 3.1, "select, specextend": 0.3, "select, streaming": 0.01}
    seconds |= {"select, quest": 0.1, "bounds, quest": 0.05}
    assert passes.selection_overhead(seconds, gamma=6) == pytest.approx(
        {
            "vegas": 0.4 / 5.6,
            "streaming": 0.01 / 5.6,
            "quest": 0.65 / 5.6,
            "specextend": 0.8 / 5.6,
        }
    )


def measured(model, groups, plan, defaults=None):
    """Return the records of some groups."""
    records = []
    for group in groups:
        rows = measure(
            model, RandomTokens(4096), group, plan, None, lambda name: None, defaults or {}
        )
        for row in rows:
            known = {"section": "s", "new_tokens": plan.new_tokens, **group.record(row.entry)}
            records.append(known | row.record())
    return records


def test_a_rows_variety_is_the_mean_over_texts_that_are_long_enough():
    outcome = Outcome([[1, 2, 1, 2, 1], [7] * 10, [1, 2, 3]], 1.0, None, None)
    row = DecodeRow(Entry("plain"), None, [outcome])
    shares = [(2 / 5 + 1 / 10) / 2, (2 / 4 + 1 / 9) / 2, (2 / 3 + 1 / 8) / 2, (1 + 1 / 7) / 2]
    assert row.distinct == pytest.approx(shares)
    assert DecodeRow(Entry("plain"), None, []).distinct is None


def test_a_row_says_how_far_it_was_at_each_length(model):
    plan = MeasurePlan(new_tokens=24, texts=1, repeats=2, lengths=(6, 12, 24))
    entries = [
        Entry("plain"),
        Entry("vegas", {"gamma": 3, "min_tokens": 16, "ratio": 1.0, "switch": False}),
    ]
    plain, vegas = measured(model, grid(entries, [40]), plan)
    assert plain["fault"] is vegas["fault"] is None
    assert [one["new_tokens"] for one in vegas["lengths"]] == [6, 12, 24]
    assert all(one["tau_without_bonus"] == 0 for one in plain["lengths"])
    # The whole prefix is drafted on, so that all is accepted: 1 token, then 4 a round.
    for one, at, done in zip(vegas["lengths"], (3, 4, 7), (9, 13, 24), strict=True):
        assert one["tau_without_bonus"] == pytest.approx((done - at) / at)
    for own, base in zip(vegas["lengths"], plain["lengths"], strict=True):
        assert own["speedup"] == {"plain": base["seconds"] / own["seconds"]}
        assert base["speedup"] == {}
    assert len(plain["distinct"]) == 4

    section = Section("s", "t", [], ("alpha", "x plain", "D1"))
    whole = section.text([plain, vegas]).splitlines()
    assert len(whole) == 4
    by_length = Section("s", "t", [], section.columns, lengths=(0.25, 0.5, 1.0))
    lines = by_length.text([vegas]).splitlines()[2:]
    assert [line.split(", ")[-1].split("  ")[0] for line in lines] == ["6 new", "12 new", "24 new"]
    rates = [f"{one['tau_without_bonus'] / 3:.2f}" for one in vegas["lengths"]]
    assert [line.split()[-3] for line in lines] == rates
    assert by_length.plan(MeasurePlan(new_tokens=24)).lengths == (6, 12, 24)


def test_a_section_can_show_the_minutes_of_another_ones_rows():
    record = {"section": "a", "speedup": {"plain": 2.0}, "seconds": 0.03, "new_tokens": 4000}
    section = Section("b", "t", rows_of="a")
    assert section.rows([record, {**record, "section": "b"}]) == [record]
    assert (COLUMNS["min"](record), COLUMNS["plain, min"](record)) == ("2.00", "4.00")
    alone = {**record, "speedup": {}}
    assert (COLUMNS["min"](alone), COLUMNS["plain, min"](alone)) == ("-", "-")


def test_processors_come_in_transformers_order():
    shaped = Shaping(penalty=1.2, top_p=0.9, min_p=0.1, eta=2e-4)
    kinds = [type(one) for one in shaped.processors(0.7)]
    assert kinds == [
        ContextualPenalty,
        TemperatureLogitsWarper,
        TopPLogitsWarper,
        MinPLogitsWarper,
        EtaLogitsWarper,
    ]
    assert [type(one) for one in shaped.processors(0.0)] == [ContextualPenalty]
    assert list(UNSHAPED.processors(1.0)) == []


def test_every_row_of_tokenswifts_tables_can_be_measured(model):
    """Each method with its options once, and each shaping once."""
    defaults = {
        name: {"drafter": models.random_drafter(name, model, "tiny")}
        for name in ("medusa", "tokenswift")
    }
    sections = suite("tokenswift", Scale(16, 64))
    names = ["Table 3", "Table 4", "Figure 3", *(f"Table {n}" for n in (5, 6, 7, 8))]
    assert [section.name for section in sections] == names
    groups = [group for section in sections for group in section.groups]
    entries = {entry.label: entry for group in groups for entry in group.entries}
    by_shaping = {group.shaping: group for group in groups}
    assert len(by_shaping) == 6 + 6 - 2  # of tables 6 and 8, which have two in common
    plan = MeasurePlan(new_tokens=4, texts=1, repeats=1, lengths=(2, 4))
    whole = Group(64, 1, 1.0, tuple(entries.values()), groups[0].shaping)
    singles = [replace(group, entries=group.entries[-1:]) for group in by_shaping.values()]
    records = measured(model, [whole, *singles], plan, defaults)
    assert [record["fault"] for record in records] == [None] * len(records)
    assert all(len(record["lengths"]) == 2 for record in records)
    swift = [record for record in records if record["method"] == "tokenswift"]
    assert all(COLUMNS[name](row) != "-" for row in swift for name in ("alpha", "beta, whole"))


def test_details_that_only_some_runs_have_are_averaged_over_those():
    def outcome(**details):
        return Outcome([[1]], 1.0, Statistics([], details=details), None)

    row = DecodeRow(None, None, [outcome(a=None, b=1), outcome(a=2.0, b=3, c="none")])
    assert row.details == {"a": 2.0, "b": 2.0}
