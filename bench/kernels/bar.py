"""One bar, and the clock, the ceilings and the memory that all of them share."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from common.clock import Stopwatch, paired_ratio, spread
from common.machine import last_level_cache

from .cases import DTYPES
from .measure import TOLERANCE, WRONG, compare
from .rotation import Pool, Rotation
from .workloads import BoundCase

CPU = torch.device("cpu")
_REST = 0.02  # seconds, after which the threads of a peer's OpenMP have stopped spinning
_PRODUCTS = 1e-3  # seconds, at least, of what shows the rate of products


@dataclass(frozen=True)
class Bar:
    """One line of the report: what was asked, what was found.

    Units: `share` of the ceiling that binds, `times` as long, `over` (longer by this part), `us`.
    """

    name: str
    target: float
    unit: str
    at_most: bool
    measured: float | None = None  # None where the output was wrong
    spread: float = 0.0
    note: str = ""
    bound: str = ""  # `memory` or `products`, of a share

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


@dataclass(frozen=True)
class Products:
    """Products of numbers in registers, by the code path in use: nobody multiplies faster."""

    call: Callable[[], int]
    operations: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> Products:
        """Return so many that a call takes about a millisecond."""
        from specattn import _cpu  # type: ignore[attr-defined]  # not built on every GPU's machine

        name = str(dtype).removeprefix("torch.")
        rounds, seconds = 512, 0.0
        while seconds < _PRODUCTS:
            rounds *= 2
            call = functools.partial(_cpu.multiply_registers, name, rounds, torch.get_num_threads())
            start = time.perf_counter()
            operations = call()
            seconds = time.perf_counter() - start
        return cls(call, operations)


class Bench:
    """Clock and memory that all bars share; `budget` is about the seconds that one may take."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.stopwatch = Stopwatch(CPU, flush=False)
        self.rested = Stopwatch(CPU, flush=False, rest=_REST)
        self.pool = Pool(2 * max(last_level_cache(CPU), 1 << 28))

    def times(self, **calls: Callable) -> dict[str, list[float]]:
        """Return seconds per call, all in turn."""
        return self.stopwatch.alternate(calls, budget=self.budget, least=7, most=1000)

    def against(self, **calls: Callable) -> dict[str, list[float]]:
        """Return seconds per call, in turn with libraries that have threads of their own."""
        return self.rested.alternate(calls, budget=self.budget, least=7, most=1000)

    def over(
        self, bar: Bar, ours: Callable, theirs: Callable, name: str, *checked: BoundCase
    ) -> Bar:
        """Return how much longer ours takes than theirs, or how many times longer theirs does."""
        if not right(*checked):
            return bar.wrong()
        times = self.times(ours=ours, theirs=theirs)
        measured = paired_ratio(times["ours"], times["theirs"])
        if bar.unit == "over":
            measured = paired_ratio(times["theirs"], times["ours"]) - 1
        note = f"{milliseconds(times['ours'])}; {name} {milliseconds(times['theirs'])}"
        return bar.found(measured, times["ours"], note)

    def share(
        self,
        rotation: Rotation,
        works: list[BoundCase],
        dtype: str,
        target: float,
        name: str,
        *,
        in_place: bool = False,
    ) -> Bar:
        """Hold a call against the ceiling that binds it.

        The least times are those of reading its bytes where it reads them, `in_place` of writing
        them back too, and of its operations in registers; whichever is longer binds.
        """
        bar = Bar(name, target, "share", at_most=False)
        if not right(works[0]):
            return bar.wrong()
        products, cost = Products.of(DTYPES[dtype]), works[0].cost
        times = self.times(
            ours=rotation.turn_of(works),
            memory=rotation.turn(rotation.rewrites() if in_place else rotation.reads()),
            products=products.call,
        )
        moved = rotation.place_bytes * (2 if in_place else 1)
        parts = {
            "memory": cost.bytes / moved,
            "products": cost.operations / products.operations,
        }
        least = {name: part * statistics.median(times[name]) for name, part in parts.items()}
        bound = max(least, key=least.__getitem__)
        share = parts[bound] * paired_ratio(times["ours"], times[bound])
        read, rate = cost.bytes / least["memory"], cost.operations / least["products"]
        note = (
            f"{milliseconds(times['ours'])}; {bound} binds: "
            f"memory {least['memory'] * 1e3:.2f} ms at {read / 1e9:.1f} GB/s, "
            f"products {least['products'] * 1e3:.2f} ms at {rate / 1e9:.0f} GFLOP/s"
        )
        return replace(bar.found(share, times["ours"], note), bound=bound)


def right(*works: BoundCase) -> bool:
    """Compare with the reference in float32; nothing else is timed."""
    for work in works:
        outputs = work.call()
        dtype = next(iter(outputs.values())).dtype
        if not compare(outputs, work.expected(torch.float32), TOLERANCE[dtype])[1]:
            return False
    return True


def milliseconds(samples: list[float]) -> str:
    """Return a median as text."""
    return f"{statistics.median(samples) * 1e3:.2f} ms"
