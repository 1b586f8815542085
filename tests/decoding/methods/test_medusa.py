"""Medusa: what it drafts from, the tree that it makes of it, and what comes out."""

import pytest
import torch

from specattn.decoding import Medusa, generate
from specattn.tree import Tree
from tests.decoding.models import (
    BATCHES,
    greedy_by_transformers,
    prompts,
    tiny_model,
)
from tests.drafters.test_heads import random_heads

# What the cache holds beyond a request's length is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

SMALL_VOCABULARY = 6  # of which a tree holds so much that even random heads are often right


def heads_for(model, **options):
    return random_heads("medusa", model, dtype=torch.float32, **options)


@pytest.mark.parametrize(("family", "lengths"), BATCHES)
def test_the_text_is_that_of_plain_decoding(family, lengths):
    model = tiny_model(family, vocab_size=SMALL_VOCABULARY)
    texts = prompts(lengths, vocabulary=SMALL_VOCABULARY)
    output = generate(model, texts, Medusa(heads_for(model), (3, 3, 3)), max_new_tokens=24)
    assert output.new_tokens == [greedy_by_transformers(model, p, 24) for p in texts]
    total, cut = output.statistics.total, 3 * len(texts)  # the last rounds need fewer levels
    assert 39 * (total.rounds - cut) <= total.drafted <= 39 * total.rounds
    assert total.mean_acceptance_length > 1.2


class Witness(Medusa):
    """Notes every draft beside the text that it follows."""

    notes = []

    def start(self, context):
        drafter, sequences = super().start(context), context.sequences
        propose = drafter.propose
        self.notes.clear()

        def noted(root):
            draft = propose(root)
            for row, tokens in zip(sequences.active, draft.tokens, strict=True):
                self.notes.append((sequences.text(row).clone(), draft.tree, tokens))
            return draft

        drafter.propose = noted
        return drafter


@pytest.mark.parametrize("widths", [(3, 3, 3), (2, 1, 4), (5,), (1, 1)], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_every_draft_comes_from_the_last_accepted_tokens_features(family, widths, monkeypatch):
    """Whichever chunk of the prompt or node of a tree that was, and whoever has finished."""
    model, texts = tiny_model(family, vocab_size=12), prompts([2, 17, 7, 8, 1, 15], vocabulary=12)
    heads = heads_for(model)
    method = Witness(heads, widths=widths)
    output = generate(model, texts, method, max_new_tokens=12, prefill_chunk_size=7)
    total = output.statistics.total
    assert len(method.notes) == total.rounds
    assert total.accepted > 0
    for text, tree, tokens in method.notes:
        assert tokens[0] == text[-1]
        if len(text) == 1 or tree.size == 1:
            continue  # no features yet, or no room for a draft
        with torch.no_grad():
            features = model.base_model(text[None, :-1]).last_hidden_state[0, -1]
            distributions = model.get_output_embeddings()(heads(features))
        guesses = [
            distribution.topk(width).indices
            for distribution, width in zip(distributions, widths[: tree.max_depth], strict=False)
        ]
        leaves = tokens[tree.paths[tree.is_leaf][:, 1:]].tolist()
        assert leaves == torch.cartesian_prod(*guesses).view(-1, tree.max_depth).tolist()


def test_trees_are_full_in_order():
    assert Medusa().max_nodes == Tree.full((3, 3, 3)).size == 40


def test_the_folder_within_the_target_is_the_default(tmp_path):
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path)
    (text,) = prompts([20])
    with pytest.raises(ValueError, match="Medusa needs a drafter: none was given, and .*medusa is"):
        generate(model, text, "medusa", max_new_tokens=4)
    heads_for(model).save_pretrained(tmp_path / "medusa")
    expected = [greedy_by_transformers(model, text, 4)]
    assert generate(model, text, "medusa", max_new_tokens=4).new_tokens == expected
    by_path = f"medusa:drafter={tmp_path / 'medusa'},widths=[2,2]"
    assert generate(model, text, by_path, max_new_tokens=4).new_tokens == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": ()}, "widths must be one or more positive numbers"),
        ({"widths": (3, 0)}, "widths must be one or more positive numbers"),
        ({"widths": (1, 1, 1, 1)}, "widths: 4 levels need as many heads, not 3"),
        ({"widths": (97,)}, "widths: 97 of a vocabulary of 96 tokens"),
    ],
)
def test_parameters_out_of_range(options, message):
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match=message):
        Medusa(heads_for(model), **options).prepared(model)


def test_heads_of_another_target_or_dtype_are_refused():
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match="its hidden_size is 64, the target's is 32"):
        Medusa(heads_for(tiny_model("qwen3", hidden_size=64))).prepared(model)
    with pytest.raises(ValueError, match="the drafter is torch.float64 on cpu"):
        Medusa(random_heads("medusa", model)).prepared(model)
