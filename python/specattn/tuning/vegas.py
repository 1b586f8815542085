"""Tunes Vegas in three steps: the share of the cache, the drafted tokens, and the share again.

1. With many drafted tokens, the smallest share whose acceptance is stable.
2. At that share, the number of drafted tokens that decodes fastest.
3. With that number, the share that decodes fastest.

(*Vegas*, arXiv 2602.07223, section 3.4.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

from specattn.decoding import Method, Plain, Target, Vegas
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.tuning.record import Measurement, Record

STEPS = ("ratio", "gamma", "ratio again")
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Sweep:
    """What is tried, and how it is measured.

    Attributes
    ----------
    ratios : tuple of float
    gammas : tuple of int
    large_gamma : int
        Drafted tokens of the first step.
    min_tokens : int
        Of `Vegas`; of the shares that select no more tokens only the largest is tried.
    stable : float
        The first step takes the smallest share that is accepted this much of the best one's.
    new_tokens, repeats, batch, seed : int
        Tokens per request and run, timed runs of each candidate on each batch, prompts decoded
        together.
    temperature : float
    """

    ratios: tuple[float, ...] = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12)
    large_gamma: int = 12
    min_tokens: int = Vegas.min_tokens
    stable: float = 0.95
    new_tokens: int = 128
    repeats: int = 2
    batch: int = 1
    seed: int = 0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ratios", "gammas"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name in ("new_tokens", "repeats", "batch"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.stable <= 1:
            raise ValueError(f"stable must be in (0, 1], got {self.stable}")
        for gamma in (*self.gammas, self.large_gamma):
            for ratio in self.ratios:
                Vegas(gamma, ratio, min_tokens=self.min_tokens)

    def distinct_ratios(self, context: int) -> list[float]:
        """Return the shares without those that read the same of so long a prompt as another."""
        least = self.min_tokens / context
        short = [ratio for ratio in self.ratios if ratio <= least]
        return [ratio for ratio in self.ratios if ratio > least or ratio == max(short)]


class Candidate(NamedTuple):
    """Settings of Vegas; `gamma` 0 is plain decoding."""

    gamma: int
    ratio: float

    def method(self, min_tokens: int) -> Method:
        """Return the method, without Vegas' switch, which would decode plainly at times."""
        if not self.gamma:
            return Plain()
        return Vegas(self.gamma, self.ratio, min_tokens=min_tokens, switch=False)

    def spelled(self, min_tokens: int) -> str:
        """Return the candidate as ``--method`` takes it."""
        least = f",min_tokens={min_tokens}" if min_tokens != Vegas.min_tokens else ""
        return f"vegas:gamma={self.gamma},ratio={self.ratio}{least}"


PLAIN = Candidate(0, 1.0)


class Result(NamedTuple):
    """All measurements of a candidate in one step, together."""

    tokens_per_second: float  # median over runs
    accepted: float  # drafted tokens per round
    speedup: float | None  # over plain decoding's run of the same turn, median; None without one


class Tuner:
    """Measures candidates step by step.

    Parameters
    ----------
    model : PreTrainedModel
    prompts : sequence of Tensor, int64 [context]
        All of one length, and as many as fill whole batches.
    sweep : Sweep
    record : Record
        What it holds already is not measured again.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[torch.Tensor], sweep: Sweep, record: Record
    ):
        self.model, self.sweep, self.record = model, sweep, record
        self.ratios = sweep.distinct_ratios(len(prompts[0]))
        size = sweep.batch
        self.batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]

    @property
    def runs(self) -> int:
        """Number of runs of the three steps."""
        candidates = 2 * len(self.ratios) + len(self.sweep.gammas) + 2
        return candidates * len(self.batches) * self.sweep.repeats

    def run(self, advance: Callable[[str], None]) -> dict[str, Any]:
        """Take the three steps, and return what was chosen; the record holds it as well.

        ``advance(step)`` is called after every run, measured or found in the record.
        """
        sweep, self._advance = self.sweep, advance
        first = self._measure("ratio", [Candidate(sweep.large_gamma, r) for r in self.ratios])
        enough = sweep.stable * max(result.accepted for result in first.values())
        stable = min(one.ratio for one, result in first.items() if result.accepted >= enough)
        second = self._measure("gamma", [PLAIN, *(Candidate(g, stable) for g in sweep.gammas)])
        gamma = _fastest(second).gamma
        third = self._measure("ratio again", [PLAIN, *(Candidate(gamma, r) for r in self.ratios)])
        best = _fastest(third)
        self.record.chosen = {
            "gamma": best.gamma,
            "ratio": best.ratio,
            "method": best.spelled(sweep.min_tokens),
            "stable_ratio": stable,
            "accepted_per_round": third[best].accepted,
            "tokens_per_second": third[best].tokens_per_second,
            "plain_tokens_per_second": third[PLAIN].tokens_per_second,
            "speedup": third[best].speedup,
        }
        self.record.write()
        return self.record.chosen

    def _measure(self, step: str, candidates: Sequence[Candidate]) -> dict[Candidate, Result]:
        """Measure what the record lacks; each batch is prefilled at most once per step."""
        done = {_key(one) for one in self.record.measurements}
        for number, prompts in enumerate(self.batches):
            snapshot: PromptSnapshot | None = None
            for repeat in range(self.sweep.repeats):
                for candidate in _rotated(candidates, repeat):
                    if (step, *candidate, number, repeat) not in done:
                        snapshot = snapshot or self._prefilled(prompts, candidates)
                        measured = self._run(snapshot, candidate, self.sweep.new_tokens, repeat)
                        known = {"step": step, **candidate._asdict(), "batch": number}
                        self.record.add({**known, "repeat": repeat, **measured})
                    self._advance(step)
        return {one: result_of(self.record.measurements, step, one) for one in candidates}

    def _prefilled(
        self, prompts: Sequence[torch.Tensor], candidates: Sequence[Candidate]
    ) -> PromptSnapshot:
        """Return the batch behind its prompts, with code and clocks warm."""
        deepest = max(candidate.gamma for candidate in candidates)
        longest = len(prompts[0]) + self.sweep.new_tokens
        target = Target(self.model, len(prompts), longest + deepest + 1, longest=longest - 1)
        snapshot = PromptSnapshot(target, prompts)
        for candidate in candidates:
            self._run(snapshot, candidate, min(WARM_UP_TOKENS, self.sweep.new_tokens), 0)
        return snapshot

    def _run(
        self, snapshot: PromptSnapshot, candidate: Candidate, new_tokens: int, repeat: int
    ) -> Measurement:
        temperature = self.sweep.temperature
        warpers = [TemperatureLogitsWarper(temperature)] if temperature not in (0.0, 1.0) else []
        _, statistics = snapshot.run(
            candidate.method(self.sweep.min_tokens),
            new_tokens,
            LogitsProcessorList(warpers),
            do_sample=temperature > 0,
            seed=self.sweep.seed + repeat,
        )
        total = statistics.total
        return {
            "new_tokens": total.new_tokens,
            "rounds": total.rounds,
            "accepted": total.accepted,
            "seconds": statistics.decode_seconds,
        }


def result_of(measurements: Sequence[Measurement], step: str, candidate: Candidate) -> Result:
    """Put a candidate's measurements of one step together."""
    own = [one for one in measurements if _key(one)[:3] == (step, *candidate)]
    accepted, rounds = (sum(one[name] for one in own) for name in ("accepted", "rounds"))
    plain = {_key(one)[3:]: _speed(one) for one in measurements if _key(one)[:3] == (step, *PLAIN)}
    ratios = [_speed(one) / plain[turn] for one in own if (turn := _key(one)[3:]) in plain]
    return Result(median(map(_speed, own)), accepted / rounds, median(ratios) if ratios else None)


def _speed(measurement: Measurement) -> float:
    return measurement["new_tokens"] / measurement["seconds"]


def _key(measurement: Measurement) -> tuple:
    return tuple(measurement[name] for name in ("step", "gamma", "ratio", "batch", "repeat"))


def _rotated(candidates: Sequence[Candidate], repeat: int) -> list[Candidate]:
    """Return them in an order that changes with every repeat: none is always the first."""
    first = repeat % len(candidates)
    return [*candidates[first:], *candidates[:first]]


def _fastest(results: dict[Candidate, Result]) -> Candidate:
    drafting = {one: result for one, result in results.items() if one.gamma}
    return max(drafting, key=lambda one: drafting[one].speedup or 0.0)
