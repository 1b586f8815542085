"""What became slower between two result files of `run_decoding.py`: seconds per new token."""

from __future__ import annotations

from common.comparison import Change
from common.records import Record
from common.tables import size

from .cases import PLAIN, row_key
from .columns import label


def key(record: Record) -> tuple | None:
    """Return what a record measures."""
    if record["kind"] == "pass":
        return "pass", record["name"], record["model"], record["context"]
    return (record["model"], *row_key(record)) if record["kind"] == "row" else None


def change(found: tuple, before: Record, after: Record) -> Change:
    """Compare two records of a key."""
    if found[0] == "pass":
        name = f"{before['name']}, {before['model']}, {size(before['context'])}"
        return Change.of_times(name, before["time"], after["time"])
    speeds = (None if one["fault"] else one["tokens_per_second"] for one in (before, after))
    times = (speed and {**speed, "median": 1 / speed["median"]} for speed in speeds)
    name = (
        f"{label(before)}, {size(before['context'])}, batch {before['batch']}, "
        f"temperature {before['temperature']:g}"
    )
    return Change.of_times(name, *times, _within(before, after))


def _within(before: Record, after: Record) -> str:
    """Return what plain decoding in the same run and acceptance say, where both runs have it."""
    over_plain = [(one.get("speedup") or {}).get(PLAIN) for one in (before, after)]
    tau = [one.get("tau") for one in (before, after)]
    text = ""
    if None not in over_plain:
        text += ", x plain {:.2f} -> {:.2f}".format(*over_plain)
    if None not in tau and tau[0] != tau[1]:
        text += ", tau {:.2f} -> {:.2f}".format(*tau)
    return text
