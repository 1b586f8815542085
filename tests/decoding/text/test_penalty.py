"""The contextual penalty, against the paper's equation and inside whole runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specattn.decoding import ContextualPenalty, generate
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

V = 7


@given(
    st.lists(st.lists(st.integers(0, V - 1), min_size=9, max_size=9), min_size=1, max_size=3),
    st.integers(1, 12),
    st.floats(0.5, 2.0),
)
def test_the_last_tokens_are_penalised_once_each(texts, window, penalty):
    logits = torch.randn(len(texts), V)
    actual = ContextualPenalty(window, penalty)(torch.tensor(texts), logits.clone())
    for text, before, after in zip(texts, logits, actual, strict=True):
        for token in range(V):
            inside = token in text[-window:]
            factor = penalty if before[token] < 0 else 1 / penalty
            expected = before[token] * factor if inside else before[token]
            torch.testing.assert_close(after[token], expected)


def test_over_the_whole_text_it_is_transformers_penalty():
    ids, logits = torch.randint(0, V, (3, 5)), torch.randn(3, V)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    assert torch.equal(ContextualPenalty(5, 1.3)(ids, logits.clone()), expected)


@pytest.mark.parametrize("method", ["plain", "vegas", "prompt_lookup"])
def test_greedy_text_is_that_of_transformers_in_a_ragged_batch(method):
    """Padding must not count, or the shorter prompts would differ from what they are alone."""
    model, texts = tiny_model("qwen3"), prompts([3, 23, 40])
    processors = LogitsProcessorList([ContextualPenalty(8, 3.0)])
    output = generate(model, texts, method, max_new_tokens=30, logits_processor=processors)
    expected = [greedy_by_transformers(model, p, 30, logits_processor=processors) for p in texts]
    assert output.new_tokens == expected
    free = [greedy_by_transformers(model, p, 30) for p in texts]
    assert all(a != b for a, b in zip(expected, free, strict=True)), "the penalty must matter"


@pytest.mark.parametrize(("arguments", "name"), [((0, 1.2), "window"), ((8, 0.0), "penalty")])
def test_parameters_out_of_range(arguments, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        ContextualPenalty(*arguments)
