"""The switch keeps to the faster kind of round, on a machine whose clock is a formula."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding.drafting.switch import REMEMBERED, SAME, TRIAL, Switch
from tests.decoding.machine import Machine

FIRST_TRIAL = 2 + 3 * TRIAL  # rounds, both kinds


@dataclass
class Costs:
    """Seconds of a round: at no length, and per token of it."""

    fixed: float
    per_token: float

    def at(self, length):
        return self.fixed + self.per_token * length


PLAIN = Costs(5.0, 0.001)


def run(
    drafting,
    tokens,
    *,
    rounds=200,
    length=1000,
    plain=PLAIN,
    late=0,
    requests=lambda n: 1,
    load=lambda n: 1,
):
    """Return the switch, and per round its length and whether it drafted.

    `load` says how many times longer a plain round takes than it costs.
    """
    machine, emitted, history, ready = Machine(late), 0, [], False
    switch = Switch(machine)
    for number in range(rounds):
        active = requests(number)
        drafts = switch.choose(length=length, requests=active, emitted=emitted)
        history.append((length, drafts))
        chosen = drafts and ready  # without a selection the round can only make one
        machine.time += drafting.at(length) if chosen else plain.at(length) * load(number)
        gain = tokens(number) if chosen else 1
        length, emitted, ready = length + gain, emitted + gain * active, drafts
    return switch, history


def kinds(history):
    return [drafts for _, drafts in history]


def test_drafts_that_pay_go_on():
    switch, history = run(Costs(12.0, 0.001), lambda n: 4)
    assert kinds(history).count(False) == 1 + TRIAL
    assert all(kinds(history)[FIRST_TRIAL:])
    details = switch.details()
    assert details["rounds without a draft"] == 1 + TRIAL
    assert details["drafting, ms per token"] < details["plain, ms per token"]
    assert details["drafting was faster from, tokens"] == history[FIRST_TRIAL][0]
    assert details["plain was faster up to, tokens"] is None


def test_drafts_that_do_not_pay_stop():
    switch, history = run(Costs(30.0, 0.001), lambda n: 4)
    assert kinds(history).count(True) == 1 + 2 * TRIAL
    assert not any(kinds(history)[FIRST_TRIAL:])
    assert switch.details()["plain was faster up to, tokens"] == history[FIRST_TRIAL][0]


def test_drafts_begin_where_they_pay():
    """From 3334 tokens on 30 + L / 1000 seconds for 4 tokens are fewer than 5 + L / 1000 for 1."""
    switch, history = run(Costs(30.0, 0.001), lambda n: 4, rounds=4000)
    first = history[FIRST_TRIAL][0]
    later = [length for length, drafts in history[FIRST_TRIAL:] if drafts]
    assert SAME * first < min(later) <= SAME * 3334
    beyond = [drafts for length, drafts in history if length > 1.01 * SAME * 3334]
    assert beyond.count(False) < 0.2 * len(beyond), "but for trials, near the break-even"
    details = switch.details()
    assert details["plain was faster up to, tokens"] < 3400
    assert 3300 < details["drafting was faster from, tokens"] < 1.01 * SAME * 3334


def test_drafts_end_where_the_text_has_become_hard():
    _, history = run(Costs(12.0, 0.001), lambda n: 4 if n < 100 else 1, rounds=300)
    assert all(kinds(history)[FIRST_TRIAL:100])
    assert not any(kinds(history)[100 + 2 * REMEMBERED :])


def test_plain_rounds_that_became_slower_are_doubted():
    """Both kinds cost about the same; what was slow for four rounds must not decide for long."""
    quick = range(FIRST_TRIAL - TRIAL - 1, FIRST_TRIAL)  # the plain rounds of the trial
    _, history = run(Costs(20.0, 0.001), lambda n: 4, load=lambda n: 0.5 if n in quick else 1)
    assert not any(kinds(history)[FIRST_TRIAL : FIRST_TRIAL + REMEMBERED])
    assert all(kinds(history)[FIRST_TRIAL + REMEMBERED + 2 * (1 + TRIAL) :])
    assert history[FIRST_TRIAL + REMEMBERED][0] < SAME * history[FIRST_TRIAL][0]


def test_a_slow_moment_does_not_end_plain_rounds():
    """Drafts lose by half; now and then a few plain rounds take twice as long."""
    for slow in (range(100, 108), range(100, 118)):
        _, history = run(
            Costs(32.0, 0.001), lambda n: 4, load=lambda n, slow=slow: 2 if n in slow else 1
        )
        assert kinds(history).count(True) <= 2 * (1 + 2 * TRIAL)
        assert not any(kinds(history)[150:])


def test_fewer_requests_are_tried_anew():
    _, history = run(Costs(12.0, 0.001), lambda n: 4, requests=lambda n: 8 if n < 100 else 4)
    plain = [number for number, drafts in enumerate(kinds(history)) if not drafts]
    assert plain[1 + TRIAL :] == list(range(100, 101 + TRIAL))


@pytest.mark.parametrize("late", [1, 7])
def test_a_clock_that_is_read_late_delays_the_decision_alone(late):
    for drafting, pays in ((Costs(12.0, 0.001), True), (Costs(30.0, 0.001), False)):
        _, history = run(drafting, lambda n: 4, late=late)
        assert set(kinds(history)[FIRST_TRIAL + 2 * late :]) == {pays}


@given(
    st.floats(0.1, 10),
    st.floats(0, 0.01),
    st.floats(1.0, 10),
    st.floats(0, 1),
    st.integers(1, 8),
    st.integers(1, 20000),
)
def test_it_decides_as_the_costs_do(fixed, per_token, factor, share, tokens, length):
    """A draft's fixed cost is `factor` plain ones, and it reads `share` of the cache."""
    plain = Costs(fixed, per_token)
    drafting = Costs(factor * fixed, share * per_token)
    switch, history = run(
        drafting, lambda n: tokens, rounds=FIRST_TRIAL + 1, length=length, plain=plain
    )
    ratio = drafting.at(length) / tokens / plain.at(length)
    if not 0.9 < ratio < 1.1:  # the length grows a little while it is measured
        assert switch.drafting == (ratio < 1)
