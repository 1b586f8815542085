"""Chooses before every round who drafts, and how much: what gives the most tokens per second.

An `Arm` says of one drafter what it offers, tokens by effort, and what it costs, as the run itself
measures it. Alone it chooses its own effort, or none; of several, `Pace` chooses one. `FixedSize`
is the plain case, which reads no clock.

Whatever is chosen changes no text: it is settled by clocks, by the text so far and by what drafters
say of it, before any of the round's tokens is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch

from specattn.decoding.drafting.gains import NONE, ChainGains, Costs, Effort, Plan, best_size
from specattn.decoding.drafting.timings import EXPLORING, Memory, PassCosts, Timings, Trials
from specattn.decoding.engine.contract import Draft, Drafter, Verified
from specattn.decoding.text.sequences import Sequences
from specattn.decoding.text.statistics import Clock

TRIAL = 3
"""Rounds that say what an arm is worth."""

_PATIENCE = 12  # rounds in which a trial must come to drafting; lookups in vain before any skip
_COLD = 4  # times what a round takes: the first of a run finds code and data cold
_AVERAGED = 32  # lookups over which savings are averaged
_STEP = 4  # each so many more in vain leave out one more between two lookups ...
_MOST_LEFT_OUT = 7  # ... up to so many
_TIMED = 4  # one lookup of so many is timed
_OFFERED = 8  # rounds for which a plan holds, whatever passes took meanwhile


class FixedSize:
    """Drafts one effort in every round, of at most `most` rows, root included."""

    def __init__(self, effort: Effort = NONE, most: int | None = None):
        self.effort, self.most, self.trials = effort, most, Trials()

    def choose(self, depth: int) -> Effort:
        """Return the effort of the round that begins, no deeper than `depth`."""
        return self.effort._replace(depth=min(self.effort.depth, depth))

    def rows(
        self, effort: Effort, drafted: int, chances: Callable[[], Any], place: Any = None
    ) -> int:
        """Return how many rows of a draft of `drafted` rows, roots included, are verified.

        ``chances()`` returns the probabilities of the drafted nodes: [B, n] with the `place` of
        each, as for `TreeGains.add`, or by request in descending order.
        """
        return min(drafted, self.most or drafted)

    def begin(self, effort: Effort, rows: int) -> None:
        """Note that a pass of `rows` rows begins, behind drafting with an effort."""

    def end(self, verified: Verified) -> None:
        """Note that it has ended, and learn from it."""

    def learn(self, drafted: int, counts: Sequence[int | None]) -> None:
        """Do what `end` does, told the longest drafted path and what each request accepted.

        None where a request verified something else.
        """

    def drop(self) -> None:
        """Forget that a pass began: it did not run alone, or not for the same requests."""

    def details(self) -> dict[str, Any]:
        """Return what was found, for the statistics of the run."""
        return {}

    def measured(self) -> tuple[dict[int, float], float]:
        """Return seconds of passes by rows that may be tried next, and of what lies between."""
        return {}, 0.0

    def timed(self, memory: Memory, kind: str, rows: int) -> Arm:
        """Return an arm that drafts as much, in passes of at most `rows` rows, or nothing."""
        arm = Arm(memory, kind, [NONE, self.effort], [1, rows], ChainGains)
        arm.effort, arm.most = self.effort, self.most
        return arm


class Arm(FixedSize):
    """Chooses how much a drafter drafts, round by round.

    A round calls `choose`, `rows` where the drafter knows probabilities, `begin` when its draft is
    ready, and `end` when that is verified. Rounds that prepare a draft rather than make one call no
    `begin`. What drafting took is remembered by `kind`, for the method's next runs, and what passes
    took by `passes`, for those of different kinds differ in what they cost. `efforts` are `NONE`
    and what may be drafted, `sizes` the rows of a pass, ascending from 1.
    """

    def __init__(
        self,
        memory: Memory,
        kind: str,
        efforts: Sequence[Effort],
        sizes: Sequence[int],
        gains: Callable[[Sequence[Effort], Sequence[int]], Any],
        passes: Hashable = "passes",
    ):
        super().__init__()
        # As a string, whose hash is kept: it is looked up in every round.
        self.memory, self.kind, self.passes = memory, f"{kind}, {list(efforts)}", passes
        self.efforts, self.sizes = list(efforts), tuple(sizes)
        self.gains = gains(self.efforts, self.sizes)
        self.trials = memory.model.recall(("pace", "trials", self.kind), Trials)
        self.alone = True  # or else whether it drafts is not its own choice
        self.guess: tuple[float, float] | None = None
        self.rounds = self.idle = 0  # of its own with a draft, and without
        self._trial: tuple[str, Effort] | None = None
        self._begun: tuple[Costs, int, Any, Hashable] | None = None
        self._ended: tuple[Any, int] | None = None
        self._costs: tuple[Any, Costs] | None = None
        self._best: tuple[Any, Plan] | None = None
        self._offered = 0  # times that the best plan was handed out unchanged
        self._latest: Costs | None = None
        self._deepest = max(effort.depth for effort in efforts)

    def choose(self, depth: int) -> Effort:
        """Return the effort of the round that begins; its depth is at most `depth`."""
        plans, self._trial = self._plans(depth), None
        best = max(plans, key=lambda plan: plan.rate)
        for kind, others in (
            ("more", [plan for plan in plans if plan.effort.rows > best.effort.rows]),
            ("none", [plan for plan in plans if plan.effort == NONE != best.effort]),
        ):
            other = max(others, key=lambda plan: plan.rate, default=best)
            loss = other.seconds - other.tokens / best.rate
            if others and self.trials.is_due(self.what(kind), loss):
                self._trial = kind, other.effort
                return other.effort
        return best.effort

    def rows(
        self, effort: Effort, drafted: int, chances: Callable[[], Any], place: Any = None
    ) -> int:
        """Return the rows with which the batch gains the most tokens per second."""
        if self.effort != NONE:  # which is fixed
            return super().rows(effort, drafted, chances, place)
        found = chances()
        if place is not None:
            self.gains.add(effort, found, place)
            found = (-np.sort(-found, -1)).tolist()
        costs, factor, self._best = self.costs(), self.gains.factor, None
        spent = costs.drafting(self.efforts).get(effort, 0.0)
        seconds = {n: spent + s for n, s in costs.passes.estimates(self.sizes).items()}
        rows = best_size(seconds, found, factor)
        more = {n: s for n, s in seconds.items() if n > 1}
        if rows == 1 and self._trial is None and more and any(found):
            best = best_size(more, [[*one, 0.0] for one in found], factor)
            tokens = fmean(1 + factor * sum(one[: best - 1]) for one in found)
            if self.trials.is_due(self.what("rows"), seconds[best] - seconds[1] * tokens):
                self.trials.tried(self.what("rows"))
                rows = min(best, 1 + max(map(len, found)))
        self.gains.expect([sum(one[: rows - 1]) for one in found])
        return rows

    def begin(self, effort: Effort, rows: int, shape: Hashable = None) -> None:
        """Note that a pass of `rows` rows begins, behind drafting with an effort.

        `shape` is its own where `rows` stands for passes of several.
        """
        costs = self._costs[1] if self._costs is not None else self.costs()
        now = self.memory.clock.now()
        if self._ended is not None and self._ended[1] == sum(self.memory.lengths()):
            self.trials.elapsed += costs.drafts.note(effort, self._ended[0], now)
        if self._trial is not None and self._trial[1] == effort:
            self.trials.tried(self.what(self._trial[0]))
        if not self.alone:
            self.trials.tried(self.what("turn"))
        self.rounds += rows > 1
        self.idle += rows == 1
        self._begun = costs, rows, now, shape

    def end(self, verified: Verified) -> None:
        """Note that it has ended, and learn from it."""
        self.learn(verified.draft.tree.max_depth, verified.counts)

    def learn(self, drafted: int, counts: Sequence[int | None]) -> None:
        """Do what `end` does, for who has no `Verified`."""
        now = self.memory.clock.now()
        if self._begun is not None:
            costs, rows, begun, shape = self._begun
            self.trials.elapsed += costs.passes.note(rows, begun, now, shape)
            self._latest = costs
        self.gains.learn(drafted, counts)
        self._begun = self._best = None
        self._ended = now, sum(self.memory.lengths())

    def drop(self) -> None:
        """Forget that a pass began: it did not run alone, or not for the same requests."""
        self._begun = self._best = None

    def details(self) -> dict[str, Any]:
        """Return what was found, for the statistics of the run."""
        if self._latest is None:
            return {}
        passes, drafts = self._latest.passes.measured, self._latest.drafts.medians
        drafts.pop(NONE, None)
        return {
            "ms per pass, by rows": {str(rows): round(1e3 * s, 2) for rows, s in passes.items()},
            "ms per draft, by width x depth": {
                f"{width} x {depth}": round(1e3 * s, 2) for (width, depth), s in drafts.items()
            },
            "rounds without a draft": self.idle,
        }

    def timed(self, memory: Memory, kind: str, rows: int) -> Arm:
        """Return this arm."""
        return self

    def measured(self) -> tuple[dict[int, float], float]:
        """Return the seconds of passes, and of what lies between them without drafting."""
        passes, drafts = self.costs()
        known = passes.estimates(self.sizes) if passes.measured else {}
        return known, drafts.seconds(NONE)

    def costs(self) -> Costs:
        """Return the costs of such a batch and length."""
        alike = self.memory.alike()
        if self._costs is None or self._costs[0] != alike:
            former = self._costs and self._costs[0][0] == alike[0] and self._costs[1]
            self._costs = alike, self.memory.recall(self.kind, lambda: self._first(former or None))
        return self._costs[1]

    def _first(self, former: Costs | None) -> Costs:
        """Return costs to begin with: those of a shorter text, or of passes of another kind."""
        memory, clock = self.memory, self.memory.clock
        if former is not None:
            return Costs(memory.recall(self.passes, former.passes.copy), former.drafts.copy())
        usual = memory.recall("passes", lambda: PassCosts(clock))
        return Costs(memory.recall(self.passes, usual.copy), Timings(clock))

    def offer(self, depth: int, row_seconds: float) -> tuple[Plan, bool]:
        """Return the best plan where a round without a draft takes `row_seconds`, or the guess."""
        if self.costs().drafts.sizes <= {NONE}:
            passes, tokens = self.guess or (0.0, 0.0)
            return Plan(NONE, tokens, passes * row_seconds), False
        key, self._offered = (self.costs().passes, min(depth, self._deepest)), self._offered + 1
        if self._best is None or self._best[0] != key or self._offered > _OFFERED:
            self._best, self._offered = (key, max(self._plans(depth), key=lambda one: one.rate)), 0
        return self._best[1], True

    def what(self, kind: str) -> Hashable:
        """Name a kind of trial of this arm, for texts alike."""
        return self.kind, kind, self.memory.alike()

    def _plans(self, depth: int) -> list[Plan]:
        """Return what every effort that may be chosen now is expected to give and to take."""
        costs = self.costs()
        passes, _ = self.measured()
        if not passes:
            return [Plan(NONE, 1.0, 1.0)]
        drafts = costs.drafting(self.efforts)
        allowed = [n for n, one in enumerate(self.efforts) if one in drafts and one.depth <= depth]
        if not self.alone:
            allowed = [n for n in allowed if self.efforts[n] != NONE] or allowed
        seconds = np.array([drafts[self.efforts[n]] for n in allowed])[:, None]
        seconds = seconds + np.array(list(passes.values()))
        tokens = 1 + self.gains.table()[allowed][:, : len(passes)]
        best = (tokens / seconds).argmax(1)
        return [
            Plan(self.efforts[n], float(tokens[at, row]), float(seconds[at, row]))
            for at, (n, row) in enumerate(zip(allowed, best, strict=True))
        ]


class PacedDrafter(Drafter):
    """A drafter whose arm says before every round how much it drafts, if anything.

    A draft that only makes ready the next one sets `prepares`: its round is not timed.
    """

    arm: FixedSize
    sequences: Sequences
    prepares = False

    def propose(self, root: torch.Tensor) -> Draft:
        """Draft as much as pays behind `root` [B]."""
        effort = self.arm.choose(self.sequences.draft_depth)
        draft = self.draft(root, effort)
        if not self.prepares:
            self.arm.begin(effort, draft.tree.size)
        return draft

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        """Draft with an effort behind `root` [B]: the root alone without any."""
        raise NotImplementedError

    def observe(self, verified: Verified) -> None:
        """Learn what was accepted of an own draft."""
        if verified.own:
            self.arm.end(verified)

    def details(self) -> dict[str, Any]:
        """Return what drafting was found to cost."""
        return self.arm.details()


class Pace:
    """Says before every round which of several arms drafts, or none: what was looked up does.

    An arm that is not the fastest is tried for some rounds when that is expected to cost a small
    share of the time: the smaller, the more trials in a row it has lost. `fastest` is that of the
    last `choose`, None for what was looked up.
    """

    def __init__(self, arms: dict[str, Arm], trials: Trials):
        self.arms, self.trials = arms, trials
        self.fastest: str | None = None
        self._offers = dict.fromkeys(arms, (Plan(NONE, 1.0, 1.0), False))  # as last compared
        self._trial: tuple[str, int, bool] | None = None  # an arm, its last round, whether cold
        self._since: tuple[Any, list[int]] = None, []  # when it began, behind which lengths
        self._patience = 0
        for arm in arms.values():
            arm.alone, arm.trials = False, trials

    def choose(
        self, depth: int, promised: Sequence[float], seconds: float, row_seconds: float | None
    ) -> str | None:
        """Return the name of an arm, or None for what was looked up.

        `depth` is that of the deepest draft of use. What was looked up promises each request so
        many tokens in so many `seconds`; a round without a draft takes `row_seconds`, None while
        nothing has been measured.
        """
        self.fastest = None
        if row_seconds is None or not self.arms:
            return None
        plans: dict[str | None, Plan] = {None: Plan(NONE, fmean(promised), seconds)}
        self._offers = {name: arm.offer(depth, row_seconds) for name, arm in self.arms.items()}
        for name, (plan, _) in self._offers.items():
            if plan.tokens >= min(promised):  # requests to which more is promised draft that
                plan = plan._replace(tokens=fmean(max(plan.tokens, one) for one in promised))
            plans[name] = plan
        timed = [None, *(name for name, (_, known) in self._offers.items() if known)]
        self.fastest = max(timed, key=lambda name: plans[name].rate)
        rate = plans[self.fastest].rate
        if self._trial is not None:
            name = self._trial[0]
            return name if self._goes_on(*self._trial, plans[name], rate) else self.fastest
        for other, plan in plans.items():
            if other != self.fastest and self._is_due(other, plan, rate):
                return other
        return self.fastest

    def looked_up(self) -> None:
        """Note that the round that begins goes without an arm."""
        self.trials.tried("lookup")

    def _goes_on(self, name: str, until: int, cold: bool, plan: Plan, rate: float) -> bool:
        """Whether a trial goes on; note who won if it does not."""
        arm, self._patience = self.arms[name], self._patience - 1
        if self._patience > 0 and not (self._offers[name][1] and arm.rounds >= until):
            return True
        lost = _loss(plan, rate, cold)
        clock, lengths, (begun, before) = arm.memory.clock, arm.memory.lengths(), self._since
        now = clock.now()
        if clock.passed(now) and len(lengths) == len(before):  # what it took, recording included
            lost = clock.seconds(begun, now) - (fmean(lengths) - fmean(before)) / rate
        self.trials.judge(arm.what("turn"), won=name == self.fastest, lost=max(0.0, lost))
        self._trial = None
        return False

    def _is_due(self, name: str | None, plan: Plan, rate: float) -> bool:
        """Whether something slower is tried now; begin its trial if so."""
        if name is None:
            # What passes without an arm take may have been chance too, and one round costs little.
            return self.trials.is_due("lookup", plan.seconds - plan.tokens / rate, EXPLORING / 4)
        arm = self.arms[name]
        cold = arm.rounds == 0
        if not self.trials.is_due(arm.what("turn"), _loss(plan, rate, cold), EXPLORING):
            return False
        arm.costs().drafts.doubt()
        self._trial, self._patience = (name, arm.rounds + TRIAL, cold), _PATIENCE
        self._since = arm.memory.clock.now(), list(arm.memory.lengths())
        return True

    def promises(self, name: str) -> float:
        """Return the tokens that an arm is expected to give a request; all while it is unknown."""
        plan, known = self._offers[name]
        return plan.tokens if known else math.inf

    def keeps(self, name: str, row_seconds: float | None) -> bool:
        """Whether an arm may be chosen soon: it is on trial, or faster than no draft."""
        if self._trial is not None and self._trial[0] == name:
            return True
        plan, known = self._offers[name]
        return known and plan.tokens * (row_seconds or 0.0) > plan.seconds


def _loss(plan: Plan, rate: float, cold: bool) -> float:
    """Return the seconds that a trial loses against so many tokens per second."""
    gain = plan.tokens / rate
    return TRIAL * max(0.0, plan.seconds - gain) + cold * max(0.0, _COLD * plan.seconds - gain)


class LookupBackoff:
    """Skips lookups that have not paid off: their expected savings against what they take.

    A round calls `skips`; if that is false, `begin`, `found` with what was looked up, and `end`
    when all is done that a round without a lookup does without; the same around what it learns.
    """

    def __init__(self, clock: Clock):
        self.clock, self.left_out = clock, 0
        self._times = Timings(clock)
        self._saved = 0.0  # seconds per lookup
        self._lookups = self._in_vain = 0
        self._worthless = False  # the last one
        self._begun: Any = None

    def skips(self) -> bool:
        """Whether the round that begins does without a lookup, and count it if so."""
        most = min((self._in_vain - _PATIENCE) // _STEP, _MOST_LEFT_OUT)
        if not self._worthless or self.left_out >= most:
            return False
        self.left_out += 1
        return True

    def begin(self) -> None:
        """Note that something begins which only lookups need."""
        self._begun = self.clock.now() if self._lookups % _TIMED == 0 else None

    def end(self, what: str) -> None:
        """Note that `what` is done, be it "asked" or "learned"."""
        if self._begun is not None:
            self._times.note(what, self._begun, self.clock.now())
            self._begun = None

    def found(self, saved: float) -> None:
        """Note what a lookup is expected to save, in seconds: 0 where it drafts nothing."""
        self.left_out = 0
        self._lookups += 1
        seconds = sum(self._times.medians.values())
        self._worthless = saved <= seconds
        self._saved += (saved - self._saved) / min(self._lookups, _AVERAGED)
        self._in_vain = 0 if self._saved > seconds else self._in_vain + 1
