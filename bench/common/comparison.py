"""What became slower between two result files, beyond what their own spread explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specattn.planning.machines import read_results

from .records import Record


@dataclass(frozen=True)
class Change:
    """One record that both files have."""

    name: str
    before: float | None  # a time, or what a bar measured; None for a row with a fault
    after: float | None
    noise: float  # how far two runs of one program may differ
    within: str = ""  # how it stood to other figures of its own run: the machine cancels out
    worse_if_larger: bool = True

    @classmethod
    def of_times(
        cls, name: str, before: Record | None, after: Record | None, within: str = ""
    ) -> Change:
        """Compare two times, each a median with its spread; None is a fault."""
        noise = sum(time["spread"] for time in (before, after) if time)
        return cls(name, before and before["median"], after and after["median"], noise, within)

    @property
    def ratio(self) -> float:
        """How many times worse it became; infinite for a row that became wrong."""
        if self.after is None:
            return 1.0 if self.before is None else float("inf")
        if self.before is None:
            return 0.0
        larger, smaller = self.after, self.before
        if not self.worse_if_larger:
            larger, smaller = smaller, larger
        if smaller <= 0:  # an overhead within the noise of zero
            return 1.0 if larger <= 0 else 1.0 + larger
        return max(larger, 0.0) / smaller

    @property
    def verdict(self) -> str:
        """Slower or faster only beyond the noise."""
        if self.ratio > 1 + self.noise:
            return "slower"
        return "faster" if self.ratio < 1 / (1 + self.noise) else "same"


Key = Callable[[Record], tuple | None]
"""What a record measures, or None where it measures nothing that is compared."""
Compare = Callable[[tuple, Record, Record], Change]
"""What to say of a key's record before and after."""


def read(path: Path, key: Key) -> tuple[Record, dict[tuple, Record]]:
    """Return the run and its records by what they measure.

    Raises ValueError for a file that is no result of a benchmark.
    """
    run, records = read_results(path)
    keyed = {key(record): record for record in records if record["kind"] != "run"}
    return run, {one: record for one, record in keyed.items() if one is not None}


def show(first: Path, second: Path, key: Key, compare: Compare) -> int:
    """Print what changed; return 1 when something became slower.

    Raises ValueError for a file that is no result of a benchmark.
    """
    (run_a, before), (run_b, after) = read(first, key), read(second, key)
    for name, run in ((first, run_a), (second, run_b)):
        print(f"{name}: {run['machine']['name']}, commit {run['commit']}, {run['time']}")
    if run_a["machine"]["name"] != run_b["machine"]["name"]:
        print("two machines: only what stands within one run can be compared")
    found = [compare(one, before[one], after[one]) for one in before.keys() & after.keys()]
    found.sort(key=lambda change: -change.ratio)
    for change in found:
        if change.verdict != "same":
            print(_line(change))
    count = {kind: sum(one.verdict == kind for one in found) for kind in ("slower", "faster")}
    print(
        f"{count['slower']} slower, {count['faster']} faster, "
        f"{len(found) - sum(count.values())} within the spread; "
        f"{len(before.keys() ^ after.keys())} in one file only"
    )
    return int(count["slower"] > 0)


def _line(change: Change) -> str:
    if change.after is None:
        return f"slower  {change.name}: WRONG or failed, was right"
    before = "a fault" if change.before is None else f"{change.before:.4g}"
    return (
        f"{change.verdict}  {change.ratio:5.2f}x  (noise {change.noise:.0%})  {change.name}: "
        f"{before} -> {change.after:.4g}{change.within}"
    )
