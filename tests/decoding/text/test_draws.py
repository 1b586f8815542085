"""Draws behind all nodes of a tree at once, and walks along them: torch's statement."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from specattn.decoding import Sampler
from specattn.decoding.text import sampling
from specattn.decoding.text.draws import CopiedReport, Draws, draw_and_walk
from specattn.decoding.text.sequences import Sequences
from tests import distributions
from tests.draws import drafts, drawn_round

SEED = 5


@given(seed=st.integers(0, 10**6))
def test_walks_are_those_of_plain_python(seed):
    case = drawn_round(seed)
    accepted, report = draw_and_walk(*case.arguments)
    nodes, rows = case.expected(one_by_one=True)
    assert torch.equal(report, rows)
    assert torch.equal(accepted.nodes, nodes)
    assert torch.equal(accepted.next_token, rows[:, 0])
    assert torch.equal(accepted.counts, rows[:, 2])


def test_what_is_drawn_follows_the_softmax():
    count, temperature = 20000, 0.7
    logits = torch.tensor([0.3, -1.0, 1.2, -torch.inf, 0.0]).expand(count, 1, 5)
    places = torch.stack([torch.zeros(count, dtype=torch.int64), torch.arange(count)])
    draws = Draws(places, 11, torch.full((count,), temperature))
    law = (logits[0, 0].double() / temperature).softmax(-1)
    drawn = draws(logits, torch.tensor([0]))[:, 0]
    assert distributions.p_value(drawn, law) > distributions.SIGNIFICANCE


def meet(case, do_sample):
    """Let the drafts be such as these samplers often draw."""
    lengths = [3 + request for request in range(len(case.tokens))]
    places = torch.tensor([list(range(len(lengths))), lengths])
    draws = Draws(places, SEED if do_sample else None)
    case.tokens = drafts(random.Random(1), case.tree, case.logits, draws)


def _samplers(processors, case, do_sample):
    """Return a sampler of texts of the case's batch, as on a GPU; and one as on a CPU."""
    batch = len(case.tokens)
    rows = [torch.arange(3 + request) for request in range(batch)]
    samplers = []
    for on_gpu in (True, False):
        room = 30 + case.tree.size
        sequences = Sequences(rows, [0] * batch, room, StoppingCriteriaList(), torch.device("cpu"))
        sampler = Sampler(processors, do_sample, sequences, seed=SEED)
        if on_gpu:
            sampler.scores.by_node = None
        samplers.append(sampler)
    return samplers


COOL, WARM = (TemperatureLogitsWarper(one) for one in (0.6, 1.4))
PROCESSORS = {
    "none": [],
    "temperature": [COOL],
    "filter": [COOL, TopKLogitsWarper(4)],
}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
def test_a_gpu_accepts_what_a_cpu_does(processors, do_sample, monkeypatch):
    """All nodes at once, or one after the other where the walk comes by: the same outcomes."""
    monkeypatch.setattr(sampling, "walk", None)  # no level by level
    compared = 0
    for seed in range(150):
        case = drawn_round(seed, 8, 40)
        if case.logits.dtype != torch.float32 or case.logits.isnan().any():
            continue
        meet(case, do_sample)
        at_once, on_host = _samplers(LogitsProcessorList(processors), case, do_sample)
        given = case.tree, case.tokens, case.logits
        accepted, report = at_once.accept(*given)
        expected, known = on_host.accept(*given)
        assert isinstance(report, CopiedReport)
        assert report.counts is None
        assert report.read() == known.read()
        assert [len(one.tokens) - 1 for one in report.read()] == known.counts
        assert all(map(torch.equal, accepted, expected))
        compared += sum(known.counts)
    assert compared > 5


def test_requests_have_temperatures_of_their_own():
    for seed in range(20):
        case = drawn_round(seed, 8, 40)
        meet(case, True)
        own = [LogitsProcessorList(one) for one in ([COOL], [], [WARM])][: len(case.tokens)]
        at_once, on_host = _samplers(own, case, True)
        given = case.tree, case.tokens, case.logits
        assert at_once.accept(*given)[1].read() == on_host.accept(*given)[1].read()
