"""The fastest is drafted, as much as pays, on a machine whose clock is a formula."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding.drafting.gains import (
    NONE,
    ChainGains,
    Effort,
    TreeGains,
    beams,
    best_total,
    chains,
    sizes_up_to,
)
from specattn.decoding.drafting.pace import TRIAL, Arm, FixedSize, LookupBackoff, Pace
from specattn.decoding.drafting.timings import EXPLORING, SIZES, Memory, PassCosts, Trials
from specattn.decoding.model.model import Model
from tests.decoding.machine import Machine


def outcome(counts, depth):
    draft = SimpleNamespace(tree=SimpleNamespace(max_depth=depth))
    return SimpleNamespace(counts=counts, draft=draft)


class Run:
    """Chains on a machine: what was drafted in every round, and how long that took."""

    def __init__(self, draft, verify, right, *, length=1000, requests=1, late=0, efforts=None):
        self.machine, self.lengths = Machine(late), [length] * requests
        memory = Memory(self.machine, lambda: self.lengths, Model())
        efforts = efforts or chains(6)
        sizes = [effort.depth + 1 for effort in efforts]
        self.arm = Arm(memory, "test", efforts, sizes, ChainGains)
        self.draft, self.verify, self.right = draft, verify, right
        self.depths, self.seconds = [], []

    def rounds(self, count, load=1.0):
        for _ in range(count):
            began, length = self.machine.time, max(self.lengths)
            depth = self.arm.choose(100).depth
            self.machine.time += load * self.draft(depth, length)
            self.arm.begin(Effort(1, depth) if depth else NONE, depth + 1)
            self.machine.time += load * self.verify(depth + 1, length)
            accepted = min(depth, self.right(len(self.depths)))
            self.lengths = [n + accepted + 1 for n in self.lengths]
            self.arm.end(outcome([accepted] * len(self.lengths), depth))
            self.depths.append(depth)
            self.seconds.append(self.machine.time - began)
        return self.depths[-count:]

    def regret(self, last):
        """Return how much longer a token of the last rounds took than it would at best, less 1."""
        length, right = max(self.lengths), self.right(len(self.depths) - 1)
        tokens = sum(1 + min(depth, right) for depth in self.depths[-last:])
        best = min(
            (self.draft(n, length) + self.verify(n + 1, length)) / (1 + min(n, right))
            for _, n in self.arm.efforts
        )
        return sum(self.seconds[-last:]) / tokens / best - 1


def linear(fixed, per):
    return lambda n, length: fixed * (n > 0) + per * n


def test_nothing_is_drafted_where_one_row_is_much_cheaper():
    run = Run(linear(0, 1.0), lambda rows, length: rows**2, lambda n: 9)
    assert set(run.rounds(2000)[100:]) <= {0, 1, 2}
    assert run.depths[100:].count(0) > 0.97 * 1900
    assert run.regret(1900) < 0.03


def test_as_much_as_may_be_is_drafted_where_rows_are_free():
    run = Run(linear(0, 0.01), lambda rows, length: 1.0, lambda n: 9)
    run.rounds(500)
    assert run.depths[30:].count(6) > 0.95 * 470
    assert run.regret(470) < 0.03


@pytest.mark.parametrize("right", [1, 2, 4])
def test_a_chain_is_as_long_as_what_is_accepted(right):
    run = Run(linear(0, 0.1), linear(1.0, 0.1), lambda n: right)
    run.rounds(600)
    assert run.depths[-300:].count(right) > 0.8 * 300
    assert run.regret(300) < 0.03


def test_sizes_begin_small():
    """Nothing is known: one row, then few; no round costs many times what was known to pay."""
    run = Run(linear(0, 0.1), lambda rows, length: 2.0**rows, lambda n: 9)
    assert run.rounds(2) == [0, 0]
    assert max(run.rounds(100)) <= 3


def test_drafts_that_do_not_pay_are_tried_seldom_and_begin_where_the_text_gets_easy():
    run = Run(linear(0, 0.5), linear(1.0, 0.1), lambda n: 0 if n < 1500 else 6)
    run.rounds(1500)
    lost = sum(s - 1.1 for s in run.seconds[200:])
    assert 0 < lost < 0.03 * sum(run.seconds[200:])
    run.rounds(300)
    assert run.depths[-100:].count(6) > 80


def test_drafts_end_where_the_text_has_become_hard():
    run = Run(linear(0, 0.3), linear(1.0, 0.1), lambda n: 6 if n < 200 else 0)
    run.rounds(200)
    assert run.depths[-100:].count(6) > 90
    run.rounds(200)
    assert run.depths[-100:].count(0) > 90


def test_drafts_begin_at_the_length_from_which_they_pay():
    """A sparse pass costs 6 at any length, a whole one 5 and 1 for every 400 tokens."""
    whole = lambda rows, length: 5 + length / 400  # noqa: E731
    run = Run(linear(0, 6.0), whole, lambda n: 6, length=100)
    run.rounds(60)
    assert run.depths[-20:].count(0) > 15
    run.lengths = [20000]
    run.rounds(60)
    assert run.depths[-20:].count(6) > 15


def test_fewer_requests_are_timed_anew():
    """A row more is free for one request, and costs as much as a pass for eight."""
    run = Run(linear(0, 0.1), None, lambda n: 6, requests=8)
    run.verify = lambda rows, length: 1.0 if len(run.lengths) == 1 else float(rows)
    run.draft = lambda depth, length: 0.1 * depth * len(run.lengths)
    run.rounds(300)
    assert run.depths[-100:].count(0) > 90
    run.lengths = run.lengths[3:4]
    assert run.rounds(2) == [0, 0], "nothing is known of such a batch"
    run.rounds(100)
    assert run.depths[-50:].count(6) > 45


def test_a_disturbance_is_doubted():
    """Another program slows ten rounds down: whatever they made it choose does not stay."""
    run = Run(linear(0, 0.2), linear(1.0, 0.05), lambda n: 6)
    run.rounds(200)
    run.rounds(10, load=8.0)
    run.rounds(1000)
    assert run.depths[-100:].count(6) > 90
    run = Run(linear(0, 1.5), linear(1.0, 0.2), lambda n: 2)
    run.rounds(200)
    assert run.depths[-100:].count(0) > 90
    run.rounds(10, load=8.0)
    run.rounds(300)
    assert run.depths[-100:].count(0) > 90


@pytest.mark.parametrize("late", [1, 7])
def test_a_clock_that_is_read_late_delays_the_decision_alone(late):
    for per, depth in ((0.05, 6), (5.0, 0)):
        run = Run(linear(0, per), linear(1.0, 0.02), lambda n: 6, late=late)
        run.rounds(200)
        assert run.depths[-100:].count(depth) > 90


def test_one_length_or_none():
    """Vegas' switch with a gamma of its own: no size lies between."""
    for per, depth in ((0.05, 5), (5.0, 0)):
        run = Run(
            linear(0, per),
            linear(1.0, 0.02),
            lambda n: 6,
            efforts=[NONE, Effort(1, 5)],
        )
        run.rounds(200)
        assert set(run.depths) <= {0, 5}
        assert run.depths[-100:].count(depth) > 90


@given(st.floats(0.0, 3.0), st.floats(0.1, 3.0), st.floats(0.0, 1.0), st.integers(0, 6))
def test_it_decides_as_the_costs_do(per_draft, fixed, per_row, right):
    """After a while the time per token is close to the best that there is."""
    draft, verify = linear(0, per_draft), linear(fixed, per_row)
    run = Run(draft, verify, lambda n: right)
    run.rounds(300)
    assert run.regret(200) < 0.1


def test_time_that_others_took_is_not_the_drafters():
    """Where rounds of another drafter lie between two of this one, nothing is measured."""
    run = Run(linear(0, 0.1), linear(1.0, 0.0), lambda n: 3)
    for _ in range(60):
        run.rounds(1)
        run.machine.time += 100.0
        run.lengths[0] += 1
    assert run.arm.details()["ms per draft, by width x depth"] == {}


def test_what_is_not_offered_is_not_held_against_it():
    gains = ChainGains(chains(4), [1, 2, 3, 5])
    for _ in range(100):
        gains.learn(2, [2, 2])
    assert gains.probabilities[:2] == pytest.approx([1, 1], abs=0.02)
    assert 2.5 < gains.table()[3].max() < 3
    assert gains.table()[2].tolist()[:2] == [-np.inf] * 2, "all that is drafted is verified"
    for _ in range(100):
        gains.learn(4, [0, 1])
    assert gains.probabilities[0] == pytest.approx(0.5, abs=0.05)
    assert gains.probabilities[1] < 0.1


def test_a_grown_tree_tells_what_smaller_ones_would_have_brought():
    efforts, sizes = beams(4, 2), sizes_up_to(9)
    assert efforts == [NONE, Effort(1, 1), Effort(1, 2), Effort(4, 1), Effort(4, 2)]
    gains = TreeGains(efforts, sizes)
    chances = np.array([[0.6, 0.2, 0.1, 0.05, 0.5, 0.1, 0.04, 0.02]])
    place = np.array([[1, 1, 1, 1, 2, 2, 2, 2], [0, 1, 2, 3, 0, 1, 2, 3]])
    gains.add(Effort(4, 2), chances, place)
    found = dict(zip(efforts, gains.table(), strict=True))
    upto = lambda values: [sum(values[: size - 1]) for size in sizes]  # noqa: E731
    assert found[NONE] == pytest.approx([0] * len(sizes))
    assert found[Effort(1, 1)] == pytest.approx(upto([0.6]))
    assert found[Effort(1, 2)] == pytest.approx(upto([0.6, 0.5]))
    assert found[Effort(4, 1)] == pytest.approx(upto([0.6, 0.2, 0.1, 0.05]))
    assert found[Effort(4, 2)] == pytest.approx(upto(sorted(chances[0].tolist(), reverse=True)))


def test_more_effort_than_was_seen_is_hoped_to_bring_a_little_more():
    efforts, sizes = beams(4, 2), sizes_up_to(9)
    gains = TreeGains(efforts, sizes)
    gains.add(Effort(1, 2), np.array([[0.6, 0.5]]), np.array([[1, 2], [0, 0]]))
    found = dict(zip(efforts, gains.table()[:, -1], strict=True))
    assert found[Effort(1, 2)] == pytest.approx(1.1)
    assert 1.1 < found[Effort(4, 2)] < 1.4


@pytest.mark.parametrize("most", [1, 4, 6, 60, 64])
def test_sizes_are_few_and_end_where_they_shall(most):
    sizes = sizes_up_to(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= len(SIZES)
    assert chains(most)[-1] == Effort(1, most)


def test_the_factor_follows_what_is_accepted():
    gains = TreeGains([NONE], [1, 5])
    assert gains.factor == 1
    for _ in range(400):
        gains.expect([4.0, 0.0])
        gains.learn(4, [1, None])
    assert 0.2 < gains.factor < 0.3


def measured(costs, rows, seconds, times=2):
    for _ in range(times):
        begun = costs.clock.now()
        costs.clock.time += seconds
        costs.note(rows, begun, costs.clock.now())


def test_sizes_grow_by_doubling_and_lie_on_lines_between():
    costs = PassCosts(Machine())
    assert costs.estimates() == {1: 1.0}
    measured(costs, 1, 9.0, times=1)  # cold
    assert costs.estimates() == {1: 1.0}
    measured(costs, 1, 2.0, times=1)
    assert costs.estimates() == {size: 2.0 for size in SIZES if size <= 4}
    measured(costs, 5, 6.0)
    found = costs.estimates()
    assert max(found) == 9
    assert (found[3], found[5], found[9]) == (4.0, 6.0, 10.0)
    measured(costs, 3, 7.0, times=9)
    assert costs.measured[5] == 7.0, "more rows never take less"


def test_of_two_sizes_that_contradict_each_other_the_later_is_believed():
    costs = PassCosts(Machine())
    measured(costs, 1, 20.0, times=3)  # while another program ran
    measured(costs, 4, 5.0)
    assert costs.measured == {1: 5.0, 4: 5.0}
    measured(costs, 2, 3.0)
    assert costs.measured == {1: 3.0, 2: 3.0, 4: 5.0}
    measured(costs, 3, 7.0)
    assert costs.measured == {1: 3.0, 2: 3.0, 3: 7.0, 4: 7.0}


def test_one_slow_pass_does_not_count_and_an_old_one_is_forgotten():
    costs = PassCosts(Machine())
    measured(costs, 1, 2.0, times=6)
    measured(costs, 1, 100.0, times=1)
    assert costs.measured[1] == 2.0
    measured(costs, 4, 50.0)
    measured(costs, 1, 2.0, times=1240)
    assert list(costs.measured) == [1, 4]
    measured(costs, 1, 2.0, times=20)
    assert list(costs.measured) == [1], "fifty times as long as it took"


class Turns:
    """Arms on a machine where a pass of any rows takes a second: who drafted in each round.

    `drafters` say by name, `lookup` of what is found in the text, what a round takes and gives:
    functions of the round's number.
    """

    def __init__(self, drafters, lookup, *, saved=0.0, late=0, guess=(4.0, 2.0), model=None):
        self.machine, self.length, model = Machine(late), 10**6, model or Model()
        self.memory = Memory(self.machine, lambda: [self.length], model)
        self.looked_up = Arm(self.memory, "suffix", [NONE], SIZES, TreeGains)
        trials = self.looked_up.trials = model.recall(("pace", "auto"), Trials)
        trials.elapsed += saved
        arms = {name: FixedSize(Effort(1, 9)).timed(self.memory, name, 10) for name in drafters}
        for arm in arms.values():
            arm.guess = guess
        self.drafters, self.lookup, self.pace = drafters, lookup, Pace(arms, trials)
        self.chosen = []

    def rounds(self, count):
        for number in range(len(self.chosen), len(self.chosen) + count):
            seconds, tokens = self.lookup(number)
            row_seconds = 1.0 if self.looked_up.measured()[0] else None
            name = self.pace.choose(20, [tokens], seconds, row_seconds)
            arm, effort = self.looked_up, NONE
            if name is None:
                self.pace.looked_up()
            else:
                arm, (seconds, tokens) = self.pace.arms[name], self.drafters[name](number)
                effort = arm.choose(20)
            self.machine.time += seconds - 1
            arm.begin(effort, 1 + effort.depth)
            self.machine.time += 1
            self.length += tokens
            arm.end(outcome([tokens - 1], effort.depth))
            self.chosen.append(name)
        return self.chosen


def always(seconds, tokens):
    return lambda number: (seconds, tokens)


@pytest.mark.parametrize("late", [0, 5])
def test_the_fastest_arm_is_found_and_kept(late):
    drafters = {"good": always(2.0, 4), "bad": always(3.0, 2)}
    chosen = Turns(drafters, always(1.0, 1), late=late).rounds(1500)
    assert chosen[:100] == [None] * 100, "nothing is tried before it can be afforded"
    assert chosen[-500:].count("good") >= 450


def test_earlier_runs_have_saved_for_trials_and_found_who_is_fastest():
    model = Model()
    chosen = Turns({"good": always(2.0, 4)}, always(1.0, 1), saved=5000.0, model=model).rounds(50)
    assert chosen[2:] == ["good"] * 48, "a pass is timed first"
    chosen = Turns({"good": always(2.0, 4)}, always(1.0, 1), model=model).rounds(20)
    assert chosen[:5] == ["good"] * 5
    assert chosen.count("good") >= 19, "but for a pass without"


def test_what_is_looked_up_goes_first_in_the_rounds_in_which_it_promises_more():
    lookup = lambda number: (1.0, 8 if number % 3 == 0 else 1)  # noqa: E731
    settled = Turns({"good": always(2.0, 4)}, lookup, saved=5000.0).rounds(90)[30:]
    assert settled[::3].count(None) >= 19
    assert settled.count("good") >= 38


def test_an_arm_is_not_credited_with_what_is_looked_up_instead():
    chosen = Turns({"slow": always(20.0, 3)}, always(22.0, 15), saved=1e5).rounds(400)
    assert chosen.count("slow") <= 0.1 * len(chosen)


@pytest.mark.parametrize("seconds", [1.05, 2.0, 8.0, 200.0])
@pytest.mark.parametrize("saved", [0.0, 300.0])
def test_trials_cost_a_small_share(seconds, saved):
    """An arm that never pays: the first time, what it costs is not known."""
    chosen = Turns({"bad": always(seconds, 1)}, always(1.0, 1), saved=saved).rounds(5000)
    lost = chosen.count("bad") * (seconds - 1.0)
    assert lost <= (2 + TRIAL) * (seconds - 1.0) + EXPLORING * (5000 + saved + lost)
    assert chosen.count("bad") >= TRIAL, "it was never tried"


def test_who_lost_is_tried_less_and_less():
    chosen = Turns({"bad": always(4.0, 1)}, always(1.0, 1)).rounds(20000)
    at = [number for number, name in enumerate(chosen) if name == "bad"]
    trials = [here for before, here in pairwise([-9, *at]) if here > before + 1]
    apart = [b - a for a, b in pairwise(trials)]
    one = TRIAL * 3.0 / EXPLORING
    assert len(apart) > 4
    assert apart[:4] == sorted(apart[:4])
    assert apart[3:] == pytest.approx([8 * one] * (len(apart) - 3), rel=0.15)


def test_an_arm_that_became_faster_is_found_again_and_one_that_became_slower_is_left():
    faster = lambda number: (4.0, 2) if number < 1000 else (1.5, 4)  # noqa: E731
    chosen = Turns({"one": faster}, always(1.0, 1)).rounds(4000)
    assert chosen[:1000].count("one") < 40
    assert chosen[-1000:].count("one") > 950
    slower = lambda number: (1.5, 4) if number < 1500 else (4.0, 2)  # noqa: E731
    chosen = Turns({"one": slower}, always(1.0, 1)).rounds(2500)
    assert chosen[1400:1500].count("one") > 90
    assert chosen[-500:].count("one") < 50


def test_passes_that_seemed_slow_are_doubted():
    """While an arm is faster, nobody else learns what a pass takes without one."""
    chosen = Turns({"good": always(2.0, 4)}, always(1.0, 1), saved=5000.0).rounds(2000)
    assert 0.005 < chosen.count(None) / 2000 < 0.03


FOUND, LEARNED = 0.05, 0.02  # what a lookup takes, where a round takes a second


def lookups(backoff, machine, saved, count):
    """Return in which of `count` rounds is looked up; round n would save ``saved(n)``."""
    asked = []
    for number in range(count):
        if not backoff.skips():
            asked.append(number)
            backoff.begin()
            machine.time += FOUND
            backoff.found(saved(number))
            backoff.end("asked")
            backoff.begin()
            machine.time += LEARNED
            backoff.end("learned")
        machine.time += 1
    return asked


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("every", [1, 10])
def test_what_saves_more_than_it_takes_is_never_left_out(late, every):
    machine = Machine(late)
    saved = every * 1.1 * (FOUND + LEARNED)
    asked = lookups(LookupBackoff(machine), machine, lambda n: saved * (n % every == 0), 600)
    assert asked == list(range(600))


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_what_saves_less_is_left_out_more_and_more(late, share):
    machine = Machine(late)
    asked = lookups(LookupBackoff(machine), machine, lambda n: share * (FOUND + LEARNED), 600)
    steps = [b - a for a, b in zip(asked, asked[1:], strict=False)]
    assert steps[:12] == [1] * 12
    assert steps == sorted(steps)
    assert steps[-1] == 8
    lost = FOUND + LEARNED
    assert sum(n >= 300 for n in asked) * lost <= 0.01 * 300


def test_a_text_that_begins_to_repeat_is_asked_in_every_round_at_once():
    machine, starts = Machine(), 400
    asked = lookups(LookupBackoff(machine), machine, lambda n: 3.0 * (n >= starts), 600)
    first = next(n for n in asked if n >= starts)
    assert first < starts + 8
    assert asked[asked.index(first) :] == list(range(first, 600))


def test_one_find_does_not_bring_back_lookups_that_do_not_pay():
    machine = Machine()
    asked = lookups(LookupBackoff(machine), machine, lambda n: 0.1 * (n % 100 == 0), 800)
    assert sum(n >= 400 for n in asked) < 0.2 * 400


@pytest.mark.parametrize(
    ("chances", "right"),
    [([], 0), ([0.9], 1), ([0.9, 0.9, 0.8], 3), ([0.9, 0.9, 0.1, 0.1], 2), ([0.04], 0)],
)
def test_a_batch_drafts_its_likeliest_tokens_as_long_as_each_pays(chances, right):
    """Four requests, whose pass takes 5% longer for each token."""
    costs = {drafted: 1 + 0.05 * drafted for drafted in range(9)}
    assert best_total(costs, 4, chances) == right


def test_a_batch_drafts_less_than_there_is_room_for_where_that_is_all_there_is():
    assert best_total({0: 1.0, 1: 1.2, 8: 1.3}, 1, [0.9, 0.8, 0.7]) == 3
    assert best_total({0: 1.0, 1: 1.2}, 1, [0.9, 0.8, 0.7]) == 1


def test_a_pass_that_is_dropped_is_not_timed():
    now = [0.0]
    clock = SimpleNamespace(now=lambda: now[0], passed=lambda at: True, seconds=lambda a, b: b - a)
    arm = Arm(Memory(clock, lambda: [100], Model()), "any", [NONE], (1, 2), ChainGains)
    for took in (1.0, 1.0, 500.0, 1.0):
        arm.begin(NONE, 1)
        now[0] += took
        if took > 1:
            arm.drop()
        arm.learn(0, ())
    assert arm.measured()[0][1] == 1.0
