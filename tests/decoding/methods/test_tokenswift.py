"""TokenSwift: its drafts, its text, and what it says of itself."""

import itertools

import pytest
import torch
from transformers import LogitsProcessorList

from specattn.decoding import ContextualPenalty, Target, TokenSwift, generate
from specattn.tree import Tree
from tests.decoding.models import (
    BATCHES,
    ending_at,
    greedy_by_transformers,
    prompts,
    tiny_model,
)
from tests.drafters.test_heads import random_heads

# What the cache holds beyond a request's length is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

SMALL_VOCABULARY = 8  # of which a tree holds so much that even random heads are often right
SMALL = {"budget": 14, "sinks": 2, "widths": (1, 2, 2), "k": 5, "n": 4}


def small(model, **options):
    heads = random_heads("tokenswift", model, dtype=torch.float32)
    return TokenSwift(heads, **{**SMALL, **options})


@pytest.mark.parametrize(("family", "lengths"), BATCHES)
def test_the_text_is_that_of_plain_decoding(family, lengths):
    """Prompts shorter and longer than the budget, and texts that outgrow it several times."""
    model = tiny_model(family, vocab_size=SMALL_VOCABULARY)
    texts = prompts(lengths, vocabulary=SMALL_VOCABULARY)
    output = generate(model, texts, small(model), max_new_tokens=40)
    assert output.new_tokens == [greedy_by_transformers(model, p, 40) for p in texts]
    statistics = output.statistics
    assert statistics.total.mean_acceptance_length > 1.2
    thinned = family not in ("mistral-sliding", "qwen3_moe")
    assert statistics.details["selections of the partial cache"] > (1 if thinned else -1)


@pytest.mark.parametrize("lengths", [[31], [1, 23, 9]], ids=["batch-1", "batch-3"])
def test_with_the_penalty_too(lengths):
    model = tiny_model("qwen3", vocab_size=SMALL_VOCABULARY)
    texts = prompts(lengths, vocabulary=SMALL_VOCABULARY)
    processors = LogitsProcessorList([ContextualPenalty(6, 3.0)])
    output = generate(model, texts, small(model), max_new_tokens=40, logits_processor=processors)
    expected = [greedy_by_transformers(model, p, 40, logits_processor=processors) for p in texts]
    assert output.new_tokens == expected
    assert output.new_tokens != [greedy_by_transformers(model, p, 40) for p in texts]
    assert output.statistics.total.accepted > 0


def test_a_budget_for_everything_makes_the_first_guess_right():
    """The draft pass then is the target itself."""
    model, texts = tiny_model("qwen3"), prompts([9, 17])
    method = small(model, budget=200, widths=(1,), k=0)
    output = generate(model, texts, method, max_new_tokens=13)
    assert output.statistics.total.acceptance_rate == 1
    assert output.statistics.details["selections of the partial cache"] == 0


def test_a_small_budget_reads_little(monkeypatch):
    model, (text,) = tiny_model("qwen3"), prompts([60])
    read = []
    draft = Target.draft

    def noting(self, tokens, offset, selection):
        read.append((selection.lengths.max().item(), tuple(selection.indices.shape)))
        return draft(self, tokens, offset, selection)

    monkeypatch.setattr(Target, "draft", noting)
    output = generate(model, text, small(model), max_new_tokens=30)
    assert set(read) == {(14, (3, 1, 2, 14))}
    assert len(read) == output.statistics.passes - 1, "the first round has no selection yet"


@pytest.mark.parametrize("dynamic", [False, True])
def test_prompts_on_both_sides_of_the_budget(dynamic):
    """The shorter one is listed whole, and goes on being so until it fills its budget."""
    model, texts = tiny_model("qwen3"), prompts([5, 9])
    method = small(model, budget=6, dynamic=dynamic)
    output = generate(model, texts, method, max_new_tokens=12)
    assert output.new_tokens == [greedy_by_transformers(model, p, 12) for p in texts]


def test_where_every_token_is_forbidden_nothing_is_drafted():
    model, (text,) = tiny_model("qwen3", vocab_size=8), prompts([5], vocabulary=8)
    everything = list(range(8))
    with pytest.raises(ValueError, match="request 0: no token can follow at position 5"):
        generate(model, text, small(model), max_new_tokens=4, suppress_tokens=everything)


@pytest.mark.parametrize("length", [5, 30])
def test_a_cache_that_is_not_kept_up_stays_as_it_is(length, monkeypatch):
    """Once the budget is full; a selection is made only behind a prompt that it cannot hold."""
    model, (text,) = tiny_model("qwen3"), prompts([length])
    read = []
    draft = Target.draft

    def noting(self, tokens, offset, selection):
        read.append((selection.lengths.max().item(), selection.indices.tolist()))
        return draft(self, tokens, offset, selection)

    monkeypatch.setattr(Target, "draft", noting)
    output = generate(model, text, small(model, dynamic=False), max_new_tokens=30)
    assert output.new_tokens == [greedy_by_transformers(model, text, 30)]
    full = [indices for count, indices in read if count == 14]
    assert len(full) > 4
    assert all(indices == full[0] for indices in full)
    assert output.statistics.details["selections of the partial cache"] == (length > 14)


class Witness(TokenSwift):
    """Notes every draft with the levels and n-grams that it was made of."""

    notes = []

    def start(self, context):
        drafter, sequences = super().start(context), context.sequences
        propose, ranked, levels = drafter.propose, drafter._ranked, []
        self.notes.clear()
        drafter._ranked = lambda *given: levels.append(ranked(*given)) or levels[-1]

        def noted(root):
            draft = propose(root)
            for request, row in enumerate(sequences.active):
                new = sequences.generated(row)
                ranks, _ = levels[-1]
                self.notes.append((new.tolist(), ranks[request], draft, request))
            return draft

        drafter.propose = noted
        return drafter


def test_the_tree_holds_the_heads_ranks_and_the_most_frequent_ngrams():
    model = tiny_model("qwen3", vocab_size=SMALL_VOCABULARY, seed=3)
    texts = prompts([3, 5], vocabulary=SMALL_VOCABULARY)
    heads = random_heads("tokenswift", model, dtype=torch.float32)
    method = Witness(heads, widths=(2, 2), k=2, n=3, budget=500)
    generate(model, texts, method, **ending_at(44))
    reused = 0
    for new, levels, draft, request in method.notes:
        paths = draft.tree.paths.expand(len(draft.tokens), -1, -1)[request]
        tokens = draft.tokens[request]
        nodes = {tuple(tokens[path[path > 0]].tolist()) for path in paths if path[0] == 0}
        key, expected = levels[0][0], set(itertools.product(*levels))
        grams = [tuple(new[at : at + 3]) for at in range(len(new) - 2) if new[at] == key]
        frequent = sorted((grams.count(gram) for gram in set(grams)), reverse=True)[:2]
        drafted = {node for node in nodes if len(node) == 3 and node in grams}
        assert sorted((grams.count(gram) for gram in drafted), reverse=True) == frequent
        assert nodes == {p[:n] for p in expected | drafted for n in range(4)}
        reused += len(drafted)
    assert reused > 20


def test_alpha_and_beta_follow_their_equations():
    model = tiny_model("qwen3", vocab_size=SMALL_VOCABULARY)
    (text,) = prompts([20], vocabulary=SMALL_VOCABULARY)
    rounds = []
    output = generate(
        model, text, small(model), max_new_tokens=60, on_tokens=lambda _, new: rounds.append(new)
    )
    details, total = output.statistics.details, output.statistics.total
    assert details["alpha"] == pytest.approx((total.new_tokens - total.rounds) / 4 / len(rounds))
    assert 0 < details["n-gram acceptance, beta"] <= details["alpha"]
    without = generate(model, text, small(model, k=0), max_new_tokens=60).statistics.details
    assert without["n-gram acceptance, beta"] == 0


def test_an_end_of_text_inside_a_draft():
    model = tiny_model("qwen3", vocab_size=SMALL_VOCABULARY)
    texts = prompts([20, 4, 11], vocabulary=SMALL_VOCABULARY)
    plain = generate(model, texts, "plain", max_new_tokens=40, eos_token_id=5).new_tokens
    output = generate(model, texts, small(model), max_new_tokens=40, eos_token_id=5)
    assert output.new_tokens == plain
    assert min(map(len, plain)) < 40


def test_the_folder_within_the_target_is_the_default(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    (text,) = prompts([20])
    with pytest.raises(ValueError, match="TokenSwift needs a drafter: none was given"):
        generate(model, text, "tokenswift", max_new_tokens=4)
    random_heads("tokenswift", model, dtype=torch.float32).save_pretrained(tmp_path / "tokenswift")
    expected = [greedy_by_transformers(model, text, 4)]
    by_name = "tokenswift:widths=[1,2,2],k=5,budget=16,sinks=2"
    assert generate(model, text, by_name, max_new_tokens=4).new_tokens == expected


def test_the_papers_tree():
    assert TokenSwift().max_nodes == Tree.full((1, 3, 3, 3)).size + 20 * 3 == 101


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": ()}, "widths must be"),
        ({"widths": (1, 0)}, "widths must be"),
        ({"k": -1}, "k must not be negative, got -1"),
        ({"n": 1}, "n must be at least 2"),
        ({"remembered": 2}, "remembered must be at least"),
        ({"sinks": 14}, "sinks must be from 0 to less than the budget of 14, got 14"),
        ({"widths": (1, 1, 1, 1, 1)}, "5 levels need 4 heads, not 3"),
        ({"widths": (97,)}, "97 of a vocabulary of 96"),
    ],
    ids=str,
)
def test_parameters_out_of_range(options, message):
    model, (text,) = tiny_model("qwen3"), prompts([5])
    with pytest.raises(ValueError, match=message):
        generate(model, text, small(model, **options), max_new_tokens=2)
