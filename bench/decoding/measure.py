"""Measure a group: every method from the same cache, in turn, and all samples kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from common.clock import paired_ratio
from common.machine import Others
from transformers import PreTrainedModel

from specattn.decoding import RequestStatistics, Statistics
from specattn.decoding.ready import ReadyTarget
from specattn.decoding.statistics import distinct
from specattn.planning import AcceptanceProfile

from .cases import PLAIN, TRANSFORMERS, Entry, Group
from .identity import Difference, explain, first_difference
from .runs import Outcome, Reached, run, run_transformers
from .shaping import UNSHAPED
from .simulation import SimulatedTarget
from .texts import Texts

WARM_UP_TOKENS = 8
PARTS = {"total": "decode", "draft": "draft", "target": "target", "accept": "accept"}
DISTINCT = 4  # Distinct-1 to Distinct-4, as in TokenSwift's tables


@dataclass(frozen=True)
class MeasurePlan:
    """How a group is measured."""

    new_tokens: int = 128  # per request and run; an end of text ends nothing
    texts: int = 2  # different prompts per request; acceptance is pooled over them
    repeats: int = 3  # timed runs of every method on each text, after a short one to warm up
    seed: int = 0  # of the first repeat; the others follow
    lengths: tuple[int, ...] = ()  # new tokens at which a single request's progress is noted

    def runs(self, group: Group) -> int:
        """Return how many runs a group takes, to warm up or timed."""
        return self.texts * (1 + self.repeats) * len(group.entries)


@dataclass
class DecodeRow:
    """What was found for one method in one group; a row with a ``fault`` has no figures."""

    entry: Entry
    group: Group
    outcomes: list[Outcome] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    fault: str | None = None
    speedups: dict[str, float] = field(default_factory=dict)
    lengths: list[dict[str, Any]] = field(default_factory=list)
    compared: int = 0  # requests whose greedy text was held against plain decoding's
    differences: list[Difference] = field(default_factory=list)
    others: float | None = None

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of every timed run."""
        return [outcome.tokens_per_second for outcome in self.outcomes]

    @property
    def statistics(self) -> list[Statistics]:
        """Of every timed run; the peer keeps none."""
        return [one.statistics for one in self.outcomes if one.statistics is not None]

    @cached_property
    def pooled(self) -> RequestStatistics | None:
        """Counts of all requests of all runs together; None for the peer."""
        requests = [request for one in self.statistics for request in one.requests]
        return Statistics(requests).total if requests else None

    @property
    def round_seconds(self) -> dict[str, float] | None:
        """Seconds per batched round, and of its parts: medians over runs."""
        kept = self.statistics
        if not kept:
            return None
        return {
            part: statistics.median(getattr(one, f"{name}_seconds") / one.passes for one in kept)
            for part, name in PARTS.items()
        }

    @property
    def distinct(self) -> list[float] | None:
        """Distinct-1 to Distinct-4 of what was generated: means over requests and runs."""
        texts = [
            tokens for one in self.outcomes for tokens in one.tokens if len(tokens) >= DISTINCT
        ]
        columns = [[distinct(tokens, n) for tokens in texts] for n in range(1, DISTINCT + 1)]
        return list(map(statistics.mean, columns)) if texts else None

    @property
    def details(self) -> dict[str, float]:
        """What the method says of its runs in numbers: means over the runs that have one."""
        found: dict[str, list[float]] = {}
        for one in self.statistics:
            for name, value in one.details.items():
                if isinstance(value, int | float):
                    found.setdefault(name, []).append(value)
        return {name: statistics.mean(values) for name, values in found.items()}

    @property
    def peak_bytes(self) -> int | None:
        """The largest memory of any run."""
        return max((o.peak_bytes for o in self.outcomes if o.peak_bytes is not None), default=None)


def measure(
    model: PreTrainedModel,
    texts: Texts,
    group: Group,
    plan: MeasurePlan,
    profile: AcceptanceProfile | None,
    advance: Callable[[str], None],
    defaults: Mapping[str, Mapping[str, Any]],
) -> list[DecodeRow]:
    """Measure all entries of a group.

    With a profile the cache holds random numbers and acceptance is simulated. ``advance`` is called
    with a name before every run; ``defaults`` are options by method.
    """
    rows = [DecodeRow(entry, group) for entry in group.entries]
    methods = {
        row.entry.label: row.entry.build(defaults) for row in rows if row.entry.name != TRANSFORMERS
    }
    room = plan.new_tokens + max((method.max_nodes for method in methods.values()), default=1)
    keep_features = any(method.reads_features for method in methods.values())
    kind = ReadyTarget
    if profile is not None:
        kind = partial(SimulatedTarget, profile=profile, seed=plan.seed)
    others = Others()
    for text in range(plan.texts):
        prompts = texts.prompts(text, group.context, group.batch)
        target = kind(model, prompts, room, keep_features=keep_features)
        for repeat in range(-1, plan.repeats):  # the first one warms up
            new_tokens = min(plan.new_tokens, WARM_UP_TOKENS) if repeat < 0 else plan.new_tokens
            seed = plan.seed + repeat
            options = (new_tokens, group.temperature, seed, group.shaping)
            for row in _in_turn(rows, repeat):
                advance(row.entry.label)
                if row.fault is not None:
                    continue
                try:
                    if row.entry.name == TRANSFORMERS:
                        outcome = run_transformers(target, *options)
                    else:
                        method = methods[row.entry.label]
                        outcome = run(target, method, *options, plan.lengths)
                except Exception as failure:  # one method that fails must not cost the others
                    row.fault = f"{type(failure).__name__}: {failure}".splitlines()[0]
                    continue
                if repeat >= 0:
                    row.outcomes.append(outcome)
        for row in rows:
            if target.prefill_seconds is not None:
                row.prefill_seconds.append(target.prefill_seconds)
        if profile is None and group.temperature == 0 and group.shaping == UNSHAPED:
            _compare(rows, model, prompts, text, plan.repeats)
    cores = others.cores()
    for row in rows:
        row.others = cores
    _relate(rows)
    _relate_lengths(rows)
    return rows


def _in_turn(rows: Sequence[DecodeRow], repeat: int) -> list[DecodeRow]:
    """Return the rows in an order that changes with every repeat: none is always the first."""
    first = repeat % len(rows)
    return [*rows[first:], *rows[:first]]


def _compare(
    rows: Sequence[DecodeRow],
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    text: int,
    repeats: int,
) -> None:
    """Hold the greedy text of every row against plain decoding's, and explain each difference."""
    plain = next((row for row in rows if row.entry.name == PLAIN), None)
    if plain is None or plain.fault:
        return
    expected = plain.outcomes[text * repeats].tokens
    for row in rows:
        if row is plain or row.fault:
            continue
        for request, tokens in enumerate(row.outcomes[text * repeats].tokens):
            row.compared += 1
            place = first_difference(expected[request], tokens)
            if place is not None:
                found = explain(model, prompts[request], expected[request], tokens, place)
                row.differences.append(Difference(text, request, place, *found))


def _relate(rows: Sequence[DecodeRow]) -> None:
    """Note how many times faster each row is than the baselines, run by run."""
    for baseline in (PLAIN, TRANSFORMERS):
        base = next((row for row in rows if row.entry.name == baseline and not row.fault), None)
        for row in rows:
            if base is not None and row is not base and not row.fault:
                row.speedups[baseline] = paired_ratio(base.speeds, row.speeds)


def _relate_lengths(rows: Sequence[DecodeRow]) -> None:
    """Note what every row had done when it reached each length, and how plain decoding compares.

    ``seconds`` per new token are medians over runs; ``tau_without_bonus`` is of all runs together.
    ``speedup`` is plain decoding's seconds per token over the row's own (TokenSwift, equation 5).
    """
    for row in rows:
        reached = [outcome.reached for outcome in row.outcomes if outcome.reached]
        row.lengths = [_pooled(runs) for runs in zip(*reached, strict=True)]
    plain = next((row for row in rows if row.entry.name == PLAIN), None)
    for row in rows if plain is not None else []:
        for own, base in zip(row.lengths, plain.lengths, strict=False):
            own["speedup"] = {PLAIN: base["seconds"] / own["seconds"]} if row is not plain else {}


def _pooled(runs: Sequence[Reached]) -> dict[str, Any]:
    rounds = sum(one.rounds for one in runs)
    return {
        "new_tokens": runs[0].length,
        "seconds": statistics.median(one.seconds / one.tokens for one in runs),
        "tau_without_bonus": sum(one.tokens - one.rounds for one in runs) / rounds,
        "speedup": {},
    }
