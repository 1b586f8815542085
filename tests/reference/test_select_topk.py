import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specattn
from specattn import reference

VALUES = [-torch.inf, torch.nan, -1.5, -0.0, 0.0, 1.0, 1.0000001, 3e38, -3e38, 1e-45]


def brute_force(row, length, ratio, budget, min_tokens, keep_first, keep_last):
    """Return the selected positions of one row of scores by repeated search."""
    wanted = budget if ratio is None else math.ceil(Fraction(str(ratio)) * length)
    count = min(max(wanted, min_tokens, keep_first + keep_last), length)
    kept = {p for p in range(length) if p < keep_first or p >= length - keep_last}

    def rank(position):
        score = row[position]
        return (position in kept, -math.inf if math.isnan(score) else score, position)

    return sorted(sorted(range(length), key=rank, reverse=True)[:count])


@st.composite
def selections(draw):
    capacity = draw(st.integers(1, 40))
    batch, heads = draw(st.integers(1, 3)), draw(st.sampled_from([None, 1, 2]))
    shape = (batch, capacity) if heads is None else (batch, heads, capacity)
    score = st.one_of(st.sampled_from(VALUES), st.floats(-5, 5, width=32))
    flat = draw(st.lists(score, min_size=math.prod(shape), max_size=math.prod(shape)))
    lengths = draw(st.lists(st.integers(0, capacity), min_size=batch, max_size=batch))
    by_ratio = draw(st.booleans())
    options = {
        "ratio": draw(st.sampled_from([0.01, 0.07, 0.1, 0.3, 0.5, 1.0])) if by_ratio else None,
        "budget": None if by_ratio else draw(st.integers(1, 50)),
        "min_tokens": draw(st.sampled_from([0, 0, 5])),
        "keep_first": draw(st.sampled_from([0, 0, 2])),
        "keep_last": draw(st.sampled_from([0, 0, 3])),
    }
    return torch.tensor(flat).view(shape), torch.tensor(lengths, dtype=torch.int32), options


@given(selections())
def test_agrees_with_brute_force(selection):
    scores, lengths, options = selection
    indices, index_lengths = reference.select_topk(scores, lengths, **options)
    assert indices.dtype == index_lengths.dtype == torch.int32
    assert indices.shape[:-1] == index_lengths.shape == scores.shape[:-1]
    for place in torch.cartesian_prod(*map(torch.arange, scores.shape[:-1])).view(
        -1, scores.dim() - 1
    ):
        place = tuple(place.tolist())
        chosen = brute_force(scores[place].tolist(), int(lengths[place[0]]), **options)
        padding = [-1] * (indices.shape[-1] - len(chosen))
        assert indices[place].tolist() == chosen + padding
        assert index_lengths[place] == len(chosen)


@pytest.mark.parametrize("percent", range(1, 101))
def test_ratio_counts_as_the_decimal_number_it_is_written_as(percent):
    lengths = torch.tensor([100, 200, 700, 1000], dtype=torch.int32)
    _, counts = reference.select_topk(torch.zeros(4, 1000), lengths, ratio=percent / 100)
    assert counts.tolist() == [percent, 2 * percent, 7 * percent, 10 * percent]


def test_zeros_of_both_signs_are_equal():
    scores = torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0]])
    indices, _ = reference.select_topk(scores, torch.tensor([5], dtype=torch.int32), budget=2)
    assert indices.tolist() == [[2, 3]]


def test_long_rows_keep_every_token_apart():
    scores = torch.zeros(1, 40000)
    indices, _ = reference.select_topk(scores, torch.tensor([39999], dtype=torch.int32), budget=3)
    assert indices.tolist() == [[39996, 39997, 39998]]


def test_float64_scores_are_told_apart_beyond_float32():
    scores = torch.tensor([[1.0, 1.0 + 1e-12, 1.0 - 1e-12, 1e300, -1e300]], dtype=torch.float64)
    lengths = torch.tensor([5], dtype=torch.int32)
    for select_topk in (reference.select_topk, specattn.select_topk):
        assert select_topk(scores, lengths, budget=2)[0].tolist() == [[1, 3]]
