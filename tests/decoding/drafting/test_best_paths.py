"""The best paths over depths are those of an enumeration, ties and all, whatever the budget."""

import heapq

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specattn.decoding.drafting.best_paths import best_paths, level_bounds


def enumerated(steps, budget):
    """Return the best paths of [depth][width] by expanding whatever comes first, one by one.

    A path's place is its score, its level, then its parent's place and its rank. A child follows
    its parent, so one that is open and comes first comes before all that are not open yet.
    """
    opened, taken = [], []

    def expand(path, score, place):
        if len(path) < len(steps):
            for rank, step in enumerate(steps[len(path)]):
                below = score + step
                own = (-float(below), place, rank)
                heapq.heappush(opened, ((own[0], len(path), own), (*path, rank), below))

    expand((), torch.zeros((), dtype=torch.float32), ())
    while opened and len(taken) < budget:
        first = heapq.heappop(opened)
        taken.append(first)
        expand(first[1], first[2], first[0][2])
    return {path: float(score) for _, path, score in taken}


def found(steps, budget):
    """Return the same of `best_paths`, of every request."""
    paths = best_paths(steps, budget)
    every = []
    for scores, parents, levels, ranks, beams in zip(*paths, paths.beams(), strict=True):
        own = []
        for n, (parent, level, rank) in enumerate(
            zip(parents.tolist(), levels.tolist(), ranks.tolist(), strict=True)
        ):
            assert parent < n, "a node stands behind its parent"
            own.append((*(own[parent] if parent >= 0 else ()), rank))
            assert level == len(own[-1]) - 1
            assert int(beams[n]) == max(own[-1])
        every.append(dict(zip(own, scores.tolist(), strict=True)))
    return every


CHANCES = st.one_of(
    st.sampled_from([0.0, -0.5, -1.0, -2.0]),  # many ties, and equal probabilities
    st.floats(-8.0, 0.0, width=32),
    st.just(float("-inf")),
)


@st.composite
def depths(draw):
    """Return log-probabilities of 1 to 15 depths, each of 1 to 16 tokens, of two requests."""
    width, depth = draw(st.integers(1, 16)), draw(st.integers(1, 15))
    if draw(st.booleans()):  # every number by itself
        rows = st.lists(CHANCES, min_size=width, max_size=width)
        drawn = draw(st.lists(rows, min_size=depth, max_size=depth))
        return torch.tensor([drawn, drawn[::-1]], dtype=torch.float32)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    steps = torch.randn(2, depth, width, generator=generator)
    chances = (draw(st.sampled_from([0.1, 1.0, 3.0])) * steps).log_softmax(-1)
    return chances.round(decimals=draw(st.sampled_from([0, 1, 4])))  # the fewer, the more ties


@settings(max_examples=120, deadline=None)
@given(steps=depths(), budget=st.one_of(st.integers(1, 255), st.sampled_from([63, 127, 254, 255])))
@example(steps=torch.zeros(2, 15, 16), budget=255)
@example(steps=torch.zeros(2, 15, 1), budget=254)
def test_the_best_paths_are_those_of_an_enumeration(steps, budget):
    steps = steps.sort(-1, descending=True).values
    for own, request in zip(found(steps, budget), steps, strict=True):
        assert own == enumerated(request, budget)


@pytest.mark.parametrize("width", [1, 2, 7, 16])
@pytest.mark.parametrize("budget", [1, 2, 63, 127, 255])
def test_equal_probabilities_fill_level_after_level(width, budget):
    """Certain tokens, and the widest tree there is: the bounds of levels hold."""
    sure = best_paths(torch.zeros(1, 15, width), budget)
    counts = sure.levels[0].bincount(minlength=15).tolist()
    left, level = budget, 1
    for count in counts:
        level *= width
        assert count == min(left, level)
        left -= count
    assert all(x <= y for x, y in zip(counts, level_bounds(15, width, budget), strict=False))


def test_a_request_depends_on_no_other():
    steps = torch.randn(5, 15, 7, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    steps = steps.sort(-1, descending=True).values
    together = best_paths(steps, 63)
    for request in range(5):
        for whole, alone in zip(
            together, best_paths(steps[request : request + 1], 63), strict=True
        ):
            assert torch.equal(whole[request], alone[0])
