"""Prompt lookup: what it copies, and that it costs the target few passes where texts repeat."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding import PromptLookup, generate
from specattn.decoding.methods.prompt_lookup import SuffixIndex
from tests.decoding.models import greedy_by_transformers, tiny_model


def looked_up(text, length, longest):
    """Return the continuation by searching the text from its end for ever shorter runs."""
    for run in range(min(longest, len(text)), 0, -1):
        for begin in range(len(text) - run - 1, -1, -1):
            if text[begin : begin + run] == text[-run:]:
                return text[begin + run : begin + run + length]
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4), st.integers(1, 5))
def test_the_latest_longest_match(text, longest, length):
    index = SuffixIndex(longest)
    for end, token in enumerate(text, start=1):
        index.extend([token])
        assert index.continuation(length) == looked_up(text[:end], length, longest)


def test_a_text_that_repeats_itself_takes_few_passes():
    model = tiny_model("qwen3")
    (block,) = torch.randint(0, 96, (1, 12), generator=torch.Generator().manual_seed(3))
    text = block.repeat(8)
    output = generate(model, text, PromptLookup(gamma=6), max_new_tokens=60)
    assert output.new_tokens == [greedy_by_transformers(model, text, 60)]
    assert output.statistics.total.accepted > 0
    assert output.statistics.passes < 60


@pytest.mark.parametrize("name", ["gamma", "longest"])
def test_parameters_out_of_range(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        PromptLookup(**{name: 0})
