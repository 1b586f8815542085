"""The partial cache against the paper's rule, one position at a time."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding.drafting.partial_cache import PartialCache
from specattn.kv_cache import KVCache
from tests.decoding.fake_gpu import FakeGPU

HQ, HK, D, CAPACITY = 4, 2, 8, 90
LAYERS, FULL_LAYERS = 3, [0, 2]


def target_of(lengths):
    """Return what a partial cache needs of a target, with random keys."""
    cache = KVCache(LAYERS, len(lengths), CAPACITY, HK, D)
    cache.storage.normal_(generator=torch.Generator().manual_seed(len(lengths)))
    cache.seqlens = torch.tensor(lengths, dtype=torch.int32)
    return SimpleNamespace(cache=cache, full_layers=FULL_LAYERS, device=torch.device("cpu"))


def grow(target, partial, lengths, queries=None):
    target.cache.seqlens = torch.tensor(lengths, dtype=torch.int32)
    if queries is None:
        partial.add(lengths)
    else:
        partial.select(queries, lengths)


class Stated:
    """One request, layer and KV head of the paper: sinks, the rest by importance, a mark."""

    def __init__(self, budget, sinks, length):
        self.budget, self.sinks = budget, sinks
        self.listed, self.mark = list(range(length)), None

    def select(self, scores):
        rest = sorted(range(self.sinks, len(scores)), key=lambda p: -scores[p])
        self.listed = list(range(min(self.sinks, len(scores))))
        self.listed += rest[: self.budget - self.sinks]
        self.mark = self.budget - 1 if len(scores) >= self.budget else None

    def add(self, position):
        if self.mark is None:
            self.listed.append(position)
            return
        self.listed[self.mark] = position
        self.mark -= 1

    def room(self):
        if self.mark is None:
            return self.budget - len(self.listed)
        return self.mark - self.sinks + 1


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=12),
    st.sampled_from([(6, 0), (9, 2), (16, 3), (80, 16)]),
)
def test_positions_are_those_of_the_paper(lengths, steps, sizes):
    budget, sinks = sizes
    target = target_of(lengths)
    partial = PartialCache(target, budget, sinks, lengths)
    generator = torch.Generator().manual_seed(7)
    assert partial.ranked == (max(lengths) < budget)
    stated = {
        (layer, request, head): Stated(budget, sinks, length)
        for layer in range(2)
        for request, length in enumerate(lengths)
        for head in range(HK)
    }
    for step in steps:
        enough = partial.ranked and min(one.room() for one in stated.values()) >= step
        assert partial.has_room(step) == enough
        lengths = [length + step - request for request, length in enumerate(lengths)]
        lengths = [max(length, now) for length, now in zip(lengths, partial.lengths, strict=True)]
        queries = torch.randn(2, len(lengths), HQ, D, generator=generator)
        before = list(partial.lengths)
        grow(target, partial, lengths, None if enough else queries)
        for (layer, request, head), one in stated.items():
            if enough:
                for position in range(before[request], lengths[request]):
                    one.add(position)
            else:
                q = queries[layer, request].view(HK, HQ // HK, D)[head].mean(0)
                keys = target.cache.layer(2 * layer)[0][request, : lengths[request], head]
                one.select((keys @ q).tolist())
        selection = partial.selection()
        for (layer, request, head), one in stated.items():
            indices, counts = selection.select(layer, queries)
            listed = indices[request, head, : counts[request, head]].tolist()
            assert listed == one.listed
            assert len(set(listed)) == len(listed) == min(budget, lengths[request])


def test_rows_that_leave_take_their_lists_along():
    target = target_of([20, 30, 25])
    partial = PartialCache(target, 8, 2, [20, 30, 25])
    partial.select(torch.randn(2, 3, HQ, D), [20, 30, 25])
    before = partial.indices.clone()
    partial.compact([2, 1])
    target.cache.seqlens = target.cache.seqlens[[2, 1]]
    grow(target, partial, [26, 30])
    assert torch.equal(partial.indices[:, 1], before[:, 1])
    assert torch.equal(partial.indices[:, 0, :, :7], before[:, 2, :, :7])
    assert (partial.indices[:, 0, :, 7] == 25).all()


def test_where_every_layer_slides_there_is_nothing_to_list():
    target = target_of([40])
    target.full_layers = []
    partial = PartialCache(target, 8, 2, [40])
    assert partial.ranked
    assert partial.has_room(1000)
    partial.add([45])


@pytest.mark.parametrize("new", [1, 5])
def test_adding_touches_new_tokens_alone(new):
    """Whatever the length: as many entries change as there are tokens, layers and heads."""
    target = target_of([60])
    partial = PartialCache(target, 32, 4, [60])
    partial.select(torch.randn(2, 1, HQ, D), [60])
    before = partial.indices.clone()
    grow(target, partial, [60 + new])
    assert (partial.indices != before).sum() == new * 2 * HK


def test_on_a_gpu_adding_waits_for_nothing():
    gpu, target = FakeGPU(), target_of([8])
    target.device = torch.device("cuda", 0)
    with gpu.serving():
        partial = PartialCache(target, 8, 2, [8])
        partial.add([10])
        assert gpu.waits == []
        assert partial.indices[0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 9, 8]
