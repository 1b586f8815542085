"""The best children of a tree's nodes: against float64, in the order of a stable sort."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels import _sizes
from specattn.triton_kernels.children import best_children, children, expand_best

from tests.beams import DTYPES, check_best, check_children, check_expanded, make_level

from .conftest import DEVICE, interpreted, mostly


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(_sizes, "part_blocks", lambda: (64, 1))


def on_device(*tensors):
    return [t.to(DEVICE) for t in tensors]


levels = {
    "batch": st.integers(1, 3),
    "nodes": st.integers(1, 9),
    "vocabulary": st.sampled_from([1, 2, 17, 63, 64, 65, 100, 515]),
    "width": st.integers(1, 40),
    "dtype": st.sampled_from(DTYPES),
    "strided": st.booleans(),
    "seed": st.integers(0, 2**16),
}


@interpreted(60)
@given(**levels)
def test_children_against_float64(batch, nodes, vocabulary, width, dtype, strided, seed):
    logits, scores, _ = make_level(batch, nodes, vocabulary, dtype, seed, strided=strided)
    found = children(*on_device(logits, scores), min(width, vocabulary))
    check_children(logits, scores, found)


@interpreted(60)
@given(**levels, first=st.sampled_from([0, 5, 60, 63, 100]))
def test_best_against_float64(batch, nodes, vocabulary, width, dtype, strided, seed, first):
    level = make_level(batch, nodes, vocabulary, dtype, seed, strided=strided, words=3)
    width = min(width, nodes * vocabulary)
    found = best_children(*on_device(*level), first, width)
    check_best(*level, first, found)


@interpreted(60)
@given(
    batch=st.integers(1, 3),
    nodes=st.integers(1, 9),
    per_node=st.integers(1, 12),
    width=st.integers(1, 20),
    first=st.sampled_from([0, 5, 60, 63, 100]),
    seed=st.integers(0, 2**16),
)
def test_choice_of_candidates(batch, nodes, per_node, width, first, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2**40, (batch, nodes, per_node), generator=generator)
    scores = -torch.randint(9, tokens.shape, generator=generator).float()  # with ties
    masks = torch.randint(-(2**63), 2**63 - 1, (batch, nodes, 2), generator=generator)
    width = min(width, nodes * per_node)
    found = expand_best(*on_device(tokens, scores, masks), first, width)
    check_expanded(tokens, scores, masks, first, width, found)


@pytest.mark.parametrize("width", mostly(30, 5, 111))
@pytest.mark.parametrize("dtype", mostly(*DTYPES), ids=str)
def test_the_lower_node_then_the_lower_token_wins_a_tie(dtype, width):
    row = torch.randint(4, (137,), generator=torch.Generator().manual_seed(width)).to(dtype)
    row[7], row[9] = 0.0, -0.0  # these are equal
    logits = row.expand(2, 3, 137).contiguous()
    masks = torch.zeros(2, 3, 2, dtype=torch.int64)
    given_ones = on_device(logits, torch.zeros(2, 3), masks)
    tokens, _, parents, _ = (x.cpu() for x in best_children(*given_ones, 0, width))
    order = row.repeat(3).float().argsort(descending=True, stable=True)[:width]
    for b in range(2):
        assert torch.equal(parents[b] * 137 + tokens[b], order)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's words for these
@pytest.mark.parametrize("width", mostly(60, 1, 18, 19))
def test_impossible_tokens(width):
    logits, _, masks = make_level(2, 3, 35, torch.bfloat16, words=2)
    logits[:, :, 1::2] = -torch.inf  # 18 of 35 are left
    logits[1, 2, 1:] = -torch.inf  # a certain one
    scores = torch.tensor([[-1.0, -2, -0.5], [-torch.inf, -1, -3]])
    found = best_children(*on_device(logits, scores, masks), 0, width)
    check_best(logits, scores, masks, 0, found)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_a_part_without_any_probability():
    logits, scores, _ = make_level(1, 2, 300, torch.float32)
    logits[0, 0, :130], logits[0, 1, 64:] = -torch.inf, -torch.inf
    check_children(logits, scores, children(*on_device(logits, scores), 20))


@pytest.mark.parametrize("shift", mostly(-1e4, 1e4))
def test_logits_far_from_zero(shift):
    logits, scores, masks = make_level(1, 2, 150, torch.float32)
    given_ones = on_device(logits + shift, scores, masks)
    check_best(logits + shift, scores, masks, 0, best_children(*given_ones, 0, 9))
