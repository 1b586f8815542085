"""The row of one method in a group, from its runs: figures, and how they stand to the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import mean, median
from typing import Any

from common.clock import paired_ratio, timing
from common.records import Record

from specattn.decoding import RequestStatistics, Statistics
from specattn.decoding.text.statistics import distinct

from .cases import PEERS, PLAIN, TRANSFORMERS, Entry, Group
from .identity import Difference
from .runs import Outcome, Reached

PARTS = {"total": "decode", "draft": "draft", "target": "target", "accept": "accept"}
DISTINCT = 4  # Distinct-1 to Distinct-4, as in TokenSwift's tables


@dataclass
class DecodeRow:
    """What was found for one method in one group; a row with a ``fault`` has no figures."""

    entry: Entry
    group: Group
    outcomes: list[Outcome] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    peer: Record | None = None  # what an engine of its own process says of itself
    fault: str | None = None
    cut: bool = False  # its runs were interrupted
    speedups: dict[str, float] = field(default_factory=dict)
    lengths: list[dict[str, Any]] = field(default_factory=list)
    compared: int = 0  # requests whose greedy text was held against plain decoding's
    differences: list[Difference] = field(default_factory=list)
    others: float | None = None
    agreement: list[float] = field(default_factory=list)  # of the model with a text's references

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
    def distinct(self) -> list[float] | None:
        """Distinct-1 to Distinct-4 of what was generated: means over requests and runs."""
        texts = [text for one in self.outcomes for text in one.tokens if len(text) >= DISTINCT]
        shares = ([distinct(text, n) for text in texts] for n in range(1, DISTINCT + 1))
        return list(map(mean, shares)) if texts else None

    @property
    def details(self) -> dict[str, float]:
        """What the method says of its runs in numbers: means over the runs that have one."""
        found: dict[str, list[float]] = {}
        if self.agreement:
            found["model ranks the reference first"] = self.agreement
        for name, value in (item for one in self.statistics for item in one.details.items()):
            if isinstance(value, int | float):
                found.setdefault(name, []).append(value)
        return {name: mean(values) for name, values in found.items()}

    def record(self) -> Record:
        """Return its figures for JSON, medians over runs; a fault has none."""
        if self.fault is not None:
            return {"fault": self.fault}
        kept, pooled = self.statistics, self.pooled
        read = [] if self.entry.name == TRANSFORMERS else self.prefill_seconds
        passes = [one.passes for one in self.outcomes if one.passes is not None]
        tau = pooled and pooled.mean_acceptance_length
        if passes:
            tau = sum(len(one.tokens[0]) for one in self.outcomes) / sum(passes)
        peaks = [one.peak_bytes for one in self.outcomes if one.peak_bytes is not None]
        seconds = {
            part: median(getattr(one, f"{name}_seconds") / one.passes for one in kept)
            for part, name in (PARTS.items() if kept else ())
        }
        first = median(one.first_seconds for one in self.outcomes) if read else 0.0
        differences = [{**asdict(one), "near_tie": one.near_tie} for one in self.differences]
        identity = {"compared": self.compared, "differences": differences}
        return {
            "fault": None,
            "tokens_per_second": timing(self.speeds),
            "prefill_seconds": median(read) if read else None,
            "first_token_seconds": median(read) + first if read else None,
            "rounds": pooled.rounds if pooled else sum(passes) or None,
            "tau": tau,
            "tau_without_bonus": tau and tau - 1,
            "acceptance_rate": pooled and pooled.acceptance_rate,
            "per_position_acceptance": pooled and pooled.position_rates,
            "conditional_acceptance": pooled and pooled.conditional_rates,
            "round_seconds": seconds or None,
            "speedup": self.speedups,
            "peak_bytes": max(peaks, default=None),
            "graph_bytes": max((one.graph_bytes for one in kept), default=0) or None,
            "identity": identity if self.compared else None,
            "distinct": self.distinct,
            "details": self.details,
            "lengths": self.lengths,
            "others": self.others,
            "peer": self.peer,
        }


def relate(rows: Sequence[DecodeRow]) -> None:
    """Note how many times faster each row is than the baselines, run by run, and at each length.

    Of a length, ``seconds`` per new token are medians over runs, ``tau_without_bonus`` is of all
    runs together, and ``speedup`` is plain decoding's seconds per token over the row's own
    (TokenSwift, equation 5).
    """
    for base in rows:
        if base.fault or not (base.entry.name == PLAIN or base.entry.name in PEERS):
            continue
        for row in rows:
            if row is not base and not row.fault:
                row.speedups[base.entry.label] = paired_ratio(base.speeds, row.speeds)
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
        "seconds": median(one.seconds / one.tokens for one in runs),
        "tau_without_bonus": sum(one.tokens - one.rounds for one in runs) / rounds,
        "speedup": {},
    }
