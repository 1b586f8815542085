"""What became slower between two result files of `run_kernels.py`: times of rows, and bars."""

from __future__ import annotations

from common.comparison import Change, ratio
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
        name, old, new = key[1], before["measured"], after["measured"]
        noise = before["spread"] + after["spread"]
        grows = before["at_most"]  # a bar of this kind is worse the larger it is
        return Change(name, old, new, ratio(old, new, worse_if_larger=grows), noise)
    name = " ".join(str(part) for part in key if part not in (None, 0, ""))
    old, new = (record["time"] and record["time"]["median"] for record in (before, after))
    noise = sum(record["time"]["spread"] for record in (before, after) if record["time"])
    within = ""
    if before["share"] and after["share"]:
        within = f", share of ceiling {before['share']:.1%} -> {after['share']:.1%}"
    return Change(name, old, new, ratio(old, new), noise, within)
