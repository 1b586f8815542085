import torch
from hypothesis import given
from hypothesis import strategies as st

import specattn
from specattn import reference
from specattn.blocks.fused import Fused
from tests.selections import OPTIONS, expected_table, scores_at_random

from .conftest import DEVICE, interpreted


@interpreted(40)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    heads=st.sampled_from([None, 2]),
    size=st.sampled_from([{"ratio": 0.07}, {"ratio": 0.5}, {"ratio": 1.0}, {"budget": 9}]),
    min_tokens=st.sampled_from([0, 5]),
    keep=st.sampled_from([(0, 0), (2, 3), (40, 0)]),
    levels=st.sampled_from([2, 1000]),
    seed=st.integers(0, 999),
)
def test_is_the_reference_exactly(lengths, heads, size, min_tokens, keep, levels, seed):
    """Few levels make many ties; they go to the later position on every backend."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), 64) if heads is None else (len(lengths), heads, 64)
    scores = torch.randint(-levels, levels, shape, generator=generator).float()
    odd = torch.rand(shape, generator=generator)
    scores = scores.masked_fill(odd < 0.1, -torch.inf).masked_fill(odd > 0.95, torch.nan)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    options = size | {"min_tokens": min_tokens, "keep_first": keep[0], "keep_last": keep[1]}
    actual = specattn.select_topk(scores.to(DEVICE), seqlens.to(DEVICE), **options)
    exact = reference.select_topk(scores, seqlens, **options)
    for x, y in zip(actual, exact, strict=True):
        assert torch.equal(x.cpu(), y)


@interpreted(30)
@given(
    layers=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    heads=st.sampled_from([None, 2]),
    options=st.sampled_from(OPTIONS),
    newer=st.sampled_from([0, 1, 12]),
    seed=st.integers(0, 999),
)
def test_all_layers_are_one_launch_behind_which_newer_tokens_follow(
    layers, lengths, heads, options, newer, seed
):
    scores = scores_at_random(seed, layers, lengths, heads)
    prefix = torch.tensor(lengths, dtype=torch.int32)
    found = Fused().select(scores.to(DEVICE), prefix.to(DEVICE), newer, **options)
    for x, y in zip(found, expected_table(scores, prefix, newer, options), strict=True):
        assert torch.equal(x.cpu(), y)
