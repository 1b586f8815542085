"""What became slower between two result files, beyond what their own spread explains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_KEYS = ("op", "variant", "shape", "dtype", "batch", "context", "rows", "page_size", "sparsity")


@dataclass(frozen=True)
class Change:
    """One row that both files have."""

    name: str
    before: float | None  # seconds, or what a bar measured; None for a row with a fault
    after: float | None
    ratio: float  # how many times worse; infinite for a row that became wrong
    noise: float  # how far two runs of one program may differ
    share_before: float | None = None  # of the ceiling in the same run: the machine cancels out
    share_after: float | None = None

    @property
    def verdict(self) -> str:
        """Slower or faster only beyond the noise."""
        if self.ratio > 1 + self.noise:
            return "slower"
        return "faster" if self.ratio < 1 / (1 + self.noise) else "same"


def read(path: Path) -> tuple[dict, dict[tuple, dict]]:
    """Return the run and its rows and bars by what they measure.

    Raises ValueError for a file that is no result of this benchmark.
    """
    run: dict = {}
    rows: dict[tuple, dict] = {}
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
            kind = record["kind"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}: not a result of run_kernels.py") from None
        if kind == "run":
            run = record
        elif kind == "row":
            rows[tuple(record.get(key) for key in _KEYS)] = record
        elif kind == "bar":
            rows[("bar", record["name"])] = record
    if not run:
        raise ValueError(f"{path}: not a result of run_kernels.py")
    return run, rows


def changes(before: dict[tuple, dict], after: dict[tuple, dict]) -> Iterator[Change]:
    """Compare the rows that both have, the worst first."""
    found = [_change(key, before[key], after[key]) for key in before.keys() & after.keys()]
    yield from sorted(found, key=lambda change: -change.ratio)


def _change(key: tuple, before: dict, after: dict) -> Change:
    if key[0] == "bar":
        name, old, new = key[1], before["measured"], after["measured"]
        noise = before["spread"] + after["spread"]
        grows = before["at_most"]  # a bar of this kind is worse the larger it is
        return Change(name, old, new, _ratio(old, new, worse_if_larger=grows), noise)
    name = " ".join(str(part) for part in key if part not in (None, 0, ""))
    old, new = (record["time"] and record["time"]["median"] for record in (before, after))
    noise = sum(record["time"]["spread"] for record in (before, after) if record["time"])
    ratio = _ratio(old, new, worse_if_larger=True)
    return Change(name, old, new, ratio, noise, before["share"], after["share"])


def _ratio(before: float | None, after: float | None, *, worse_if_larger: bool) -> float:
    if after is None:
        return 1.0 if before is None else float("inf")
    if before is None:
        return 0.0
    larger, smaller = (after, before) if worse_if_larger else (before, after)
    if smaller <= 0:  # an overhead within the noise of zero
        return 1.0 if larger <= 0 else 1.0 + larger
    return max(larger, 0.0) / smaller


def show(first: Path, second: Path) -> int:
    """Print what changed; return 1 when something became slower."""
    (run_a, rows_a), (run_b, rows_b) = read(first), read(second)
    for name, run in ((first, run_a), (second, run_b)):
        print(f"{name}: {run['machine']['name']}, commit {run['commit']}, {run['time']}")
    if run_a["machine"]["name"] != run_b["machine"]["name"]:
        print("two machines: only shares of the ceiling can be compared")
    found = list(changes(rows_a, rows_b))
    for change in found:
        if change.verdict != "same":
            print(_line(change))
    count = {kind: sum(one.verdict == kind for one in found) for kind in ("slower", "faster")}
    print(
        f"{count['slower']} slower, {count['faster']} faster, "
        f"{len(found) - sum(count.values())} within the spread; "
        f"{len(rows_a.keys() ^ rows_b.keys())} in one file only"
    )
    return int(count["slower"] > 0)


def _line(change: Change) -> str:
    if change.after is None:
        return f"slower  {change.name}: WRONG or failed, was right"
    shares = ""
    if change.share_before and change.share_after:
        shares = f", share of ceiling {change.share_before:.1%} -> {change.share_after:.1%}"
    before = "a fault" if change.before is None else f"{change.before:.4g}"
    return (
        f"{change.verdict}  {change.ratio:5.2f}x  (noise {change.noise:.0%})  {change.name}: "
        f"{before} -> {change.after:.4g}{shares}"
    )
