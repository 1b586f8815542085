"""What became slower between two result files of `run_kernels.py`: times of rows, and bars."""

from __future__ import annotations

from common.comparison import Change
from common.records import Record

_KEYS = ("op", "variant", "shape", "dtype", "batch", "context", "rows", "page_size", "sparsity")


def key(record: Record) -> tuple | None:
    """Return what a record measures."""
    if record["kind"] == "bar":
        return "bar", record["name"]
    return tuple(record.get(key) for key in _KEYS) if record["kind"] == "row" else None


def change(key: tuple, before: Record, after: Record) -> Change:
    """Compare two records of a key."""
    if key[0] == "bar":
        noise = before["spread"] + after["spread"]
        grows = before["at_most"]  # a bar of this kind is worse the larger it is
        measured = before["measured"], after["measured"]
        return Change(key[1], *measured, noise, worse_if_larger=grows)
    within = ""
    if before["share"] and after["share"]:
        within = f", share of ceiling {before['share']:.1%} -> {after['share']:.1%}"
    name = " ".join(str(part) for part in key if part not in (None, 0, ""))
    return Change.of_times(name, before["time"], after["time"], within)
