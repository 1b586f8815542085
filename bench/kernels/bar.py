"""One bar, and the clock and memory that all of them share."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from common.clock import Stopwatch, paired_ratio, spread
from common.machine import last_level_cache

from .measure import TOLERANCE, WRONG, compare
from .rotation import Pool, Rotation
from .workloads import BoundCase

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Bar:
    """One line of the report: what was asked, what was found.

    Units: `share` of the read bandwidth, `times` as long, `over` (longer by this part), `us`.
    """

    name: str
    target: float
    unit: str
    at_most: bool
    measured: float | None = None  # None where the output was wrong
    spread: float = 0.0
    note: str = ""

    def found(self, measured: float | None, samples: list[float], note: str = "") -> Bar:
        """Return the bar with what was measured, and how far the samples of ours lie apart."""
        return replace(self, measured=measured, spread=spread(samples), note=note)

    def wrong(self) -> Bar:
        """Return the bar of an output that was wrong."""
        return replace(self, note=WRONG)

    @property
    def met(self) -> bool:
        """Whether the target was reached; a wrong output reaches none."""
        if self.measured is None:
            return False
        return self.measured <= self.target if self.at_most else self.measured >= self.target


class Bench:
    """Clock and memory that all bars share; `budget` is about the seconds that one may take."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.stopwatch = Stopwatch(CPU, flush=False)
        self.pool = Pool(2 * max(last_level_cache(CPU), 1 << 28))

    def times(self, **calls: Callable) -> dict[str, list[float]]:
        """Return seconds per call, all in turn."""
        return self.stopwatch.alternate(calls, budget=self.budget, least=7, most=1000)

    def share(self, rotation: Rotation, works: list[BoundCase], target: float, name: str) -> Bar:
        """Hold a call against a plain read of the same caches."""
        bar = Bar(name, target, "share", at_most=False)
        if not right(works[0]):
            return bar.wrong()
        times = self.times(ours=rotation.turn_of(works), read=rotation.turn(rotation.reads()))
        share = paired_ratio(times["ours"], times["read"])
        share *= works[0].cost.bytes / rotation.place_bytes
        read = rotation.place_bytes / statistics.median(times["read"]) / 1e9
        note = f"{milliseconds(times['ours'])}; plain read {read:.1f} GB/s"
        return bar.found(share, times["ours"], note)


def right(work: BoundCase) -> bool:
    """Compare with the reference in float32; nothing else is timed."""
    outputs = work.call()
    dtype = next(iter(outputs.values())).dtype
    return compare(outputs, work.expected(torch.float32), TOLERANCE[dtype])[1]


def milliseconds(samples: list[float]) -> str:
    return f"{statistics.median(samples) * 1e3:.2f} ms"
