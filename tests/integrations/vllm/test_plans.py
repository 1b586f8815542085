"""What a step may draft, by what steps took: no vLLM is needed to say it."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the methods of decoding need it")
from specattn.integrations.vllm.plans import NOTHING, OWN, TEXTS, choose, from_target, from_texts
from specattn.integrations.vllm.steps import Steps


class Machine:
    """Steps that take what a test says."""

    def __init__(self, requests=1, length=100):
        self.now = 0.0
        clock = SimpleNamespace(
            now=lambda: self.now, passed=lambda one: True, seconds=lambda begin, end: end - begin
        )
        self.steps, self.lengths = Steps(clock), [length] * requests
        self.steps.end(0.0, self.lengths, counts=False)

    def step(self, drafted, seconds, depth=0, drafting=0.0):
        """Draft tokens, so many of them at each level by the target, and verify them."""
        asked = self.now
        self.now += drafting
        self.steps.begin(drafted, depth, asked, asked)
        self.now += seconds
        self.steps.end(self.now, self.lengths, counts=True)

    def of(self, *drafted):
        """Return what steps take that draft so much."""
        rows = len(self.lengths) + np.array((0, *drafted))
        return self.steps.seconds(rows)[1:].tolist()


def test_before_a_plain_step_was_timed_nothing_is_chosen():
    plans = from_texts(Machine().steps, [[0.9, 0.8]])
    chosen, best = choose(plans, {}, elapsed=0.0)
    assert chosen is best
    assert chosen.source == NOTHING


def test_the_first_steps_of_a_size_may_compile_and_no_later_one_decides():
    machine = Machine()
    machine.step(0, 1.0)
    for seconds in (9.0, 1.5, 7.0):
        machine.step(1, seconds)
    assert machine.of(1) == [1.5]
    for seconds in (100.0, 1.5):
        machine.step(1, seconds)
        assert machine.of(1) == [1.5]


def test_a_step_has_at_most_twice_the_rows_of_any_before():
    machine = Machine(requests=4)
    machine.step(0, 1.0)
    assert machine.of(4, 6) == [1.1, np.inf]  # a tenth for as many rows again, until one was timed
    for _ in range(3):
        machine.step(4, 1.4)
    assert machine.of(2, 6, 12, 16) == pytest.approx([1.2, 1.6, 2.2, np.inf])


@pytest.mark.parametrize(("longer", "known"), [(1.4, 1.0), (10, np.inf)])
def test_of_a_somewhat_longer_text_the_costs_of_the_one_before_are_the_first_guess(longer, known):
    machine = Machine()
    machine.step(0, 1.0)
    machine.lengths = [round(longer * machine.lengths[0])]
    machine.steps.end(machine.now, machine.lengths, counts=False)
    assert machine.steps.plain == known


def test_the_likeliest_tokens_of_all_requests_are_drafted():
    machine = Machine(requests=3)
    machine.step(0, 1.0)
    for _ in range(3):
        machine.step(3, 1.3)
    plans = from_texts(machine.steps, [[0.9, 0.5, 0.1], [0.8], []])
    assert [(one.source, one.taken) for one in plans] == [
        (NOTHING, [0, 0, 0]),
        (TEXTS, [2, 1, 0]),
        (TEXTS, [3, 1, 0]),
    ]
    assert plans[1].tokens == pytest.approx(1 + 2.2 / 3)
    assert plans[1].seconds == pytest.approx(1.3)
    assert choose(plans, {}, machine.steps.elapsed)[1] is plans[1]


def test_the_target_drafts_for_those_to_whom_it_brings_more():
    machine = Machine(requests=2)
    machine.step(0, 1.0)
    for _ in range(3):
        machine.step(2, 1.0, depth=1, drafting=0.1)
    promised, gains = np.array([1.6, 0.0]), np.array([[0.9, 1.5], [0.9, 1.7]])
    depths, taken = np.array([1, 2]), [2, 0]
    one, *more = from_target(machine.steps, taken, promised, gains, depths, share=0.5)
    assert (one.source, one.depth, one.own, one.taken, more) == (OWN, 2, [False, True], taken, [])
    assert one.tokens == pytest.approx(1 + (1.6 + 1.7) / 2)
    assert one.seconds == pytest.approx(1.0 + 0.2), "two levels take twice what one took"


def test_what_loses_is_done_again_when_that_costs_little_of_the_time_since():
    machine = Machine()
    machine.step(0, 1.0)
    for _ in range(3):
        machine.step(1, 1.7)
    plans = from_texts(machine.steps, [[0.5]])
    loss = 1.7 - 1.5
    for since, source in ((0.9 * loss / 0.005, NOTHING), (1.1 * loss / 0.005, TEXTS)):
        chosen, best = choose(plans, {TEXTS: 1000.0}, 1000.0 + since)
        assert (chosen.source, best.source) == (source, NOTHING)
