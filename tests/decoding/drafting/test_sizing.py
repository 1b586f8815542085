"""Drafts are as large as pays, on a machine whose clock is a formula."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding import METHODS, generate
from specattn.decoding.drafting import costs, sizing
from specattn.decoding.drafting.costs import PassCosts, Timings
from specattn.decoding.drafting.sizing import (
    NONE,
    ChainGains,
    Effort,
    Sizer,
    TreeGains,
    beams,
    chains,
    sizes_up_to,
)
from tests.decoding.fuzzing import drafter_of, model_of
from tests.decoding.machine import Machine
from tests.decoding.models import prompts


class Model:
    """Costs are remembered by model."""


class Text:
    """The sequences of a run, of which only lengths matter."""

    def __init__(self, length, requests=1):
        self.ends, self.active = [length] * requests, list(range(requests))

    @property
    def active_lengths(self):
        return [self.ends[row] for row in self.active]


def sizer_of(machine, text, efforts, sizes=None, gains=ChainGains):
    sizes = sizes or [effort.depth + 1 for effort in efforts]
    cpu = torch.device("cpu")
    target = SimpleNamespace(model=Model(), device=cpu, lockstep=None, clock=lambda: machine)
    context = SimpleNamespace(target=target, sequences=text)
    return Sizer(context, "test", efforts, sizes, gains)


def outcome(counts, depth):
    return SimpleNamespace(
        accepted=SimpleNamespace(counts=torch.tensor(counts)),
        draft=SimpleNamespace(tree=SimpleNamespace(max_depth=depth)),
    )


class Run:
    """Chains on a machine: what was drafted in every round, and how long that took."""

    def __init__(self, draft, verify, right, *, length=1000, requests=1, most=6, **o):
        self.machine, self.text = Machine(o.get("late", 0)), Text(length, requests)
        efforts = o.get("efforts") or chains(most)
        self.sizer = sizer_of(self.machine, self.text, efforts)
        self.draft, self.verify, self.right = draft, verify, right
        self.depths, self.seconds = [], []

    def rounds(self, count, load=1.0):
        for _ in range(count):
            began, length = self.machine.time, max(self.text.active_lengths)
            depth = self.sizer.choose(100).depth
            self.machine.time += load * self.draft(depth, length)
            self.sizer.begin(Effort(1, depth) if depth else NONE, depth + 1)
            self.machine.time += load * self.verify(depth + 1, length)
            accepted = min(depth, self.right(len(self.depths)))
            for row in self.text.active:
                self.text.ends[row] += accepted + 1
            self.sizer.end(outcome([accepted] * len(self.text.active), depth))
            self.depths.append(depth)
            self.seconds.append(self.machine.time - began)
        return self.depths[-count:]

    def regret(self, last):
        """Return how much longer a token of the last rounds took than it would at best, less 1."""
        length, right = max(self.text.active_lengths), self.right(len(self.depths) - 1)
        tokens = sum(1 + min(depth, right) for depth in self.depths[-last:])
        best = min(
            (self.draft(n, length) + self.verify(n + 1, length)) / (1 + min(n, right))
            for _, n in self.sizer.efforts
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
    run.text.ends[0] = 20000
    run.rounds(60)
    assert run.depths[-20:].count(6) > 15


def test_fewer_requests_are_timed_anew():
    """A row more is free for one request, and costs as much as a pass for eight."""
    run = Run(linear(0, 0.1), None, lambda n: 6, requests=8)
    run.verify = lambda rows, length: 1.0 if len(run.text.active) == 1 else float(rows)
    run.draft = lambda depth, length: 0.1 * depth * len(run.text.active)
    run.rounds(300)
    assert run.depths[-100:].count(0) > 90
    run.text.active = [3]
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
        run.text.ends[0] += 1
    assert run.sizer.details()["ms per draft, by width x depth"] == {}


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
    assert len(sizes) <= len(costs.SIZES)
    assert chains(most)[-1] == Effort(1, most)


VOCABULARY = 24


def sized(kind):
    """Return a method that sizes its drafts by itself, with a random drafter where it needs one."""
    name, _, option = kind.partition(", ")
    if name in ("longspec", "poss", "medusa", "tokenswift"):
        given = {"drafter": drafter_of(name, "qwen3", VOCABULARY, 0.7)}
        given |= {"gamma": "auto"} if option else {}
        given |= {"budget": 30, "sinks": 2} if name == "tokenswift" else {}
        return METHODS[name](**given)
    if name in ("vegas", "streaming", "quest", "specextend", "triforce"):
        small = drafter_of("small", "qwen3", VOCABULARY, 0.7)
        return METHODS[name](min_tokens=4, **({"draft": small} if option else {}))
    return METHODS[name]()


KINDS = (
    *("longspec", "longspec, chain", "poss", "medusa", "tokenswift", "token_recycling"),
    *("prompt_lookup", "vegas", "streaming", "quest", "specextend", "triforce"),
    *("triforce, small model", "suffix"),
)
SAMPLING = ({"temperature": 0}, {"temperature": 1.0, "top_k": 0, "seed": 5})


def with_costs(monkeypatch, seconds):
    """Let passes of so many rows cost `seconds(rows)`, and drafts nothing."""

    def estimates(self, sizes=costs.SIZES):
        return {size: seconds(size) for size in sizes}

    monkeypatch.setattr(PassCosts, "estimates", estimates)
    monkeypatch.setattr(PassCosts, "measured", {1: seconds(1)})
    monkeypatch.setattr(sizing, "_is_due", lambda *_: False)
    monkeypatch.setattr(Timings, "medians", property(lambda self: {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_drafts_nothing_where_rows_are_dear_and_much_where_they_are_free(
    monkeypatch, kind
):
    model, texts = model_of("qwen3", VOCABULARY, 0.7), prompts([30], vocabulary=VOCABULARY)
    drafted = {}
    for costly in (True, False):
        with_costs(monkeypatch, lambda rows, costly=costly: 100.0**rows if costly else 1.0)
        found = generate(model, texts, sized(kind), max_new_tokens=30, temperature=0)
        drafted[costly] = found.statistics.total.drafted
        monkeypatch.undo()
    assert drafted[True] == 0
    assert drafted[False] >= 8


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_chosen_the_text_is_that_of_plain_decoding(
    monkeypatch, kind, sampling, compile
):
    """Efforts and rows are random, for a batch whose requests end apart."""
    model = model_of("qwen3", VOCABULARY, 0.7)
    texts = prompts([5, 17, 30], vocabulary=VOCABULARY)
    generator = random.Random(7)

    def choose(self, depth):
        fitting = [effort for effort in self.efforts if effort.depth <= depth]
        return generator.choice(fitting)

    def rows(self, effort, probabilities):
        return min(generator.choice([1, 2, 3, 4, 9, 17]), 1 + max(map(len, probabilities)))

    monkeypatch.setattr(Sizer, "choose", choose)
    monkeypatch.setattr(Sizer, "rows", rows)
    options = {"max_new_tokens": 24, "compile": compile, **sampling}
    found = generate(model, texts, sized(kind), **options)
    if kind != "suffix":  # whose own choice it is
        assert found.statistics.total.drafted > 0
    assert found.new_tokens == generate(model, texts, "plain", **options).new_tokens


def test_what_is_told_is_obeyed():
    """Explicit sizes are drafted in every round, from the first one on."""
    model, text = model_of("qwen3", VOCABULARY, 0.7), prompts([30], vocabulary=VOCABULARY)
    drafters = {
        kind: drafter_of(kind, "qwen3", VOCABULARY, 0.7) for kind in ("longspec", "poss", "medusa")
    }
    methods = {
        11: METHODS["longspec"](drafters["longspec"], widths=(3, 8)),
        7: METHODS["poss"](drafters["poss"], width=3, depth=3, total_tokens=8),
        6: METHODS["medusa"](drafters["medusa"], widths=(2, 2)),
        9: METHODS["token_recycling"](nodes=9, k=3),
        3: METHODS["streaming"](gamma=3),
    }
    for drafted, method in methods.items():
        found = generate(model, text, method, max_new_tokens=12, temperature=0, seed=None)
        total = found.statistics.total
        ends = 3 * drafted  # the last rounds have no use for whole drafts
        assert drafted * total.rounds - ends <= total.drafted <= drafted * total.rounds
        assert "ms per pass, by rows" not in found.statistics.details
