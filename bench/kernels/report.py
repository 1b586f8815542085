"""Rows and bars as text."""

from __future__ import annotations

from collections.abc import Sequence

from common.records import Record
from common.tables import aligned, size

from .bar import Bar
from .measure import WRONG

HEADER = [
    (name, "<" if name in ("primitive", "variant", "shape", "bound by", "best peer") else ">")
    for name in (
        *("primitive", "variant", "shape", "B", "context", "rows", "time", "±", "GB/s"),
        "of ceiling",
        *("bound by", "best peer", "its time", "speedup", "error"),
    )
]
_UNITS = {"share": "{:.1%}", "over": "{:+.1%}", "times": "{:.2f}x", "us": "{:.1f} us"}


def table(rows: Sequence[Record]) -> str:
    """Return the rows of a sweep as text."""
    return aligned(HEADER, [_cells(row) for row in rows])


def bar(line: Bar, *, disturbed: bool) -> str:
    """Return one bar as a line; "absent" is what cannot be measured here, and the note says why."""
    show = _UNITS[line.unit].format
    limit = ("at most " if line.at_most else "") + show(line.target).lstrip("+")
    found = "-" if line.measured is None else show(line.measured)
    verdict = "met" if line.met else "MISSED"
    if line.measured is None and line.note != WRONG:
        verdict = "absent"
    note = line.note + "  (others used the machine)" * disturbed
    return f"{verdict:7}{line.name:82}{limit:>14}{found:>9}  ±{line.spread:4.0%}  {note}"


def best_peer(row: Record) -> tuple[str, dict] | None:
    """Return the fastest peer that computes the same, and its time."""
    return min(row["peers"].items(), key=lambda peer: peer[1]["median"], default=None)


def _cells(row: Record) -> tuple[str, ...]:
    sparse = f" {row['sparsity']:.0%}" if row["sparsity"] else ""
    dtype = "" if row["dtype"] == "bf16" else f" {row['dtype']}"
    context = size(row["context"]) if row["context"] else "-"
    name = (row["op"], row["variant"] + sparse, row["shape"] + dtype)
    name = (*name, str(row["batch"]), context, str(row["rows"]))
    error = "inf" if row["error"] is None else f"{row['error']:.0e}"
    if row["time"] is None:
        return (*name, WRONG if row["fault"] == WRONG else "FAILED", *[""] * 7, error)
    peer: tuple[str, ...] = ("none", "", "")
    if best := best_peer(row):
        peer = (best[0], _time(best[1]["median"]), f"{best[1]['ratio']:.2f}x")
    figures = f"{row['time']['spread']:.0%}", f"{row['bandwidth'] / 1e9:.1f}", f"{row['share']:.1%}"
    return (*name, _time(row["time"]["median"]), *figures, row["bound"], *peer, error)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
