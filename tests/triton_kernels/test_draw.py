"""Tokens drawn behind all nodes, and walks along them: exactly `add_gumbel_noise`'s draws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels import draw as kernels

from specattn.acceptance import walk
from specattn.decoding.text.draws import Draws, draw_and_walk, report_of
from specattn.tree import Tree
from tests import distributions
from tests.draws import drawn_round

from .conftest import DEVICE, WHOLE, interpreted, mostly

SEEDS = st.integers(0, 10**6)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Of 1024 tokens each: the interpreter takes its time."""
    monkeypatch.setattr(kernels, "COUNTERS", 256)


@interpreted(14)
@given(seed=SEEDS)
def test_walks_are_those_of_plain_python(seed):
    case = drawn_round(seed)
    accepted, report = draw_and_walk(*case.to(DEVICE).arguments)
    nodes, rows = case.to(DEVICE).expected()
    assert torch.equal(report.cpu(), rows)
    assert torch.equal(accepted.nodes.cpu(), nodes)
    assert torch.equal(accepted.next_token.cpu(), rows[:, 0])
    assert torch.equal(accepted.counts.cpu(), rows[:, 2])


@interpreted(14)
@given(seed=SEEDS)
def test_are_torchs_statement(seed):
    tree, tokens, logits, draws = drawn_round(seed, 14, 300).to(DEVICE).arguments
    accepted, report = draw_and_walk(tree, tokens, logits, draws)
    drawn = draws(logits, tree.depths)
    expected = walk(tree, tokens, lambda node, _: drawn.gather(1, node[:, None])[:, 0])
    for one, other in zip(accepted, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(report, report_of(tree, tokens, expected))


@pytest.mark.parametrize("seed", mostly(0, 1, 2, 3))
def test_parts_are_taken_together_in_several_steps(seed, monkeypatch):
    """As of a vocabulary of 150,000 behind a tree of 64 nodes."""
    monkeypatch.setattr(kernels, "WALKED", 32)
    case = drawn_round(seed, 4, 1024 * 4 + 1)
    _, report = draw_and_walk(*case.to(DEVICE).arguments)
    assert torch.equal(report.cpu(), case.to(DEVICE).expected()[1])


@WHOLE
def test_what_is_drawn_follows_the_softmax():
    """The root's token, of texts that differ in their length alone."""
    count, temperature = 100, 0.7
    logits = torch.tensor([0.3, -1.0, 1.2, -torch.inf, 0.0]).expand(count, 1, 5)
    places = torch.stack([torch.zeros(count, dtype=torch.int64), torch.arange(count)])
    draws = Draws(places.to(DEVICE), 11, torch.full((count,), temperature, device=DEVICE))
    tokens = torch.zeros(count, 1, dtype=torch.int64, device=DEVICE)
    tree = Tree.chain(0, device=DEVICE)
    accepted, _ = draw_and_walk(tree, tokens, logits.to(DEVICE), draws)
    law = (logits[0, 0].double() / temperature).softmax(-1)
    assert distributions.p_value(accepted.next_token.cpu(), law) > distributions.SIGNIFICANCE


@pytest.mark.parametrize("greedy", [True, False])
def test_of_equal_scores_the_first_is_taken(greedy):
    logits = torch.full((1, 1, 9000), 1.0, device=DEVICE)
    logits[0, 0, [700, 4500, 8999]] = torch.inf
    draws = Draws(torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), None if greedy else 1)
    token = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    accepted, _ = draw_and_walk(Tree.chain(0, device=DEVICE), token, logits, draws)
    assert accepted.next_token.tolist() == [700]
