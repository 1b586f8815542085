"""What became slower between two result files, beyond what their own spread explains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specattn.planning.machines import read_results

from .records import Record, label, row_key
from .tables import size

_CALL = ("op", "variant", "shape", "dtype", "batch", "context", "rows", "page_size", "sparsity")
"""What tells one row of `run_kernels.py` from another."""


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

    def __str__(self) -> str:
        if self.after is None:
            return f"slower  {self.name}: WRONG or failed, was right"
        before = "a fault" if self.before is None else f"{self.before:.4g}"
        return (
            f"{self.verdict}  {self.ratio:5.2f}x  (noise {self.noise:.0%})  {self.name}: "
            f"{before} -> {self.after:.4g}{self.within}"
        )


def key(record: Record) -> tuple | None:
    """Return what a record measures, None where that is not compared."""
    if record["kind"] == "bar":
        return "bar", record["name"]
    if record["kind"] == "pass":
        return "pass", record["name"], record["model"], record["context"]
    if record["kind"] != "row":
        return None
    if "op" in record:
        return "call", *(record.get(name) for name in _CALL)
    return "decoding", record["model"], *row_key(record)


def change(key: tuple, before: Record, after: Record) -> Change:
    """Compare two records of a key; decoding by seconds per token."""
    kind, *parts = key
    if kind == "bar":
        measured, noise = (
            (before["measured"], after["measured"]),
            before["spread"] + after["spread"],
        )
        return Change(before["name"], *measured, noise, worse_if_larger=before["at_most"])
    if kind == "pass":
        name = f"{before['name']}, {before['model']}, {size(before['context'])}"
        return Change.of_times(name, before["time"], after["time"])
    if kind == "call":
        name = " ".join(str(part) for part in parts if part not in (None, 0, ""))
        shares = _both(before["share"], after["share"], ", share of ceiling {:.1%} -> {:.1%}")
        return Change.of_times(name, before["time"], after["time"], shares)
    speeds = (None if one["fault"] else one["tokens_per_second"] for one in (before, after))
    times = (speed and {**speed, "median": 1 / speed["median"]} for speed in speeds)
    name = (
        f"{label(before)}, {size(before['context'])}, batch {before['batch']}, "
        f"temperature {before['temperature']:g}"
    )
    plain = [(one.get("speedup") or {}).get("plain") for one in (before, after)]
    within, taus = (
        _both(*plain, ", x plain {:.2f} -> {:.2f}"),
        (before.get("tau"), after.get("tau")),
    )
    within += _both(*taus, ", tau {:.2f} -> {:.2f}") if taus[0] != taus[1] else ""
    return Change.of_times(name, *times, within)


def _both(before: float | None, after: float | None, form: str) -> str:
    return "" if before is None or after is None else form.format(before, after)


def read(path: Path) -> tuple[Record, dict[tuple, Record]]:
    """Return the run and its records by what they measure; raises ValueError for another file."""
    run, records = read_results(path)
    keyed = {key(record): record for record in records if record["kind"] != "run"}
    return run, {one: record for one, record in keyed.items() if one is not None}


def show(first: Path, second: Path) -> int:
    """Print what changed; return 1 when something became slower. Raises as `read` does."""
    (run_a, before), (run_b, after) = read(first), read(second)
    for name, run in ((first, run_a), (second, run_b)):
        print(f"{name}: {run['machine']['name']}, commit {run['commit']}, {run['time']}")
    machines = run_a["machine"], run_b["machine"]
    known = ["name", *(["kind"] if all("kind" in one for one in machines) else [])]
    if any(machines[0][one] != machines[1][one] for one in known):
        print("two machines: only what stands within one run can be compared")
    found = [change(one, before[one], after[one]) for one in before.keys() & after.keys()]
    found.sort(key=lambda change: -change.ratio)
    for one in found:
        if one.verdict != "same":
            print(one)
    count = {kind: sum(one.verdict == kind for one in found) for kind in ("slower", "faster")}
    print(
        f"{count['slower']} slower, {count['faster']} faster, "
        f"{len(found) - sum(count.values())} within the spread; "
        f"{len(before.keys() ^ after.keys())} in one file only"
    )
    return int(count["slower"] > 0)
