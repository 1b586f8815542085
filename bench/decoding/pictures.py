"""Pictures of measured rows: speed by context, acceptance by position, and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common import pictures
from common.pictures import Panel
from common.records import Record
from common.tables import size

from .cases import PLAIN
from .columns import drafting, label

SPEED = "tokens/s, without prefill"
KINDS = ("speed", "acceptance", "sweep", "lengths", "parts")


def draw(
    records: Sequence[Record], folder: Path, note: str | None, kinds: Sequence[str], prefix: str
) -> list[Path]:
    """Draw what rows without a fault can show, under a note; return the files.

    Raises ImportError where matplotlib is not installed.
    """
    right = [record for record in records if not record["fault"]]
    return [
        path
        for kind in kinds
        for path in pictures.draw(
            _PANELS[kind](right), folder / f"{prefix}{kind}.png", note, color="red"
        )
    ]


def _speed(records: Sequence[Record]) -> list[Panel]:
    """Tokens per second by context, a bar per method; a panel for each temperature and batch."""

    def fill(rows: Sequence[Record], axis: Any) -> None:
        contexts, methods = sorted({row["context"] for row in rows}), _by(rows, label)
        width = 0.8 / len(methods)
        for number, (name, own) in enumerate(methods):
            speeds = [row["tokens_per_second"] for row in own]
            axis.bar(
                [contexts.index(row["context"]) + (number + 0.5) * width - 0.4 for row in own],
                [speed["median"] for speed in speeds],
                width,
                yerr=[speed["median"] * speed["spread"] / 2 for speed in speeds],
                capsize=2,
                label=name,
            )
        axis.set_xticks(range(len(contexts)), [size(context) for context in contexts])
        axis.set_xlabel("context, tokens")
        axis.set_ylabel(SPEED)

    return _panels(records, fill)


def _acceptance(records: Sequence[Record]) -> list[Panel]:
    """Rates given that all before was accepted; a panel for each temperature and batch."""
    drafted = [row for row in records if row["conditional_acceptance"]]

    def fill(rows: Sequence[Record], axis: Any) -> None:
        for row in rows:
            rates = row["conditional_acceptance"]
            axis.plot(range(1, len(rates) + 1), rates, marker="o", label=_place(row))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(xlabel="position in the draft", ylabel="accepted, given all before", ylim=(0, 1))

    return _panels(drafted, fill)


def _sweep(records: Sequence[Record]) -> list[Panel]:
    """Speed, and accepted tokens, over the share of the cache that is read; a line per gamma."""
    swept = [row for row in records if {"gamma", "ratio"} <= row["settings"].keys()]
    swept.sort(key=lambda row: row["settings"]["ratio"])
    if len({row["settings"]["ratio"] for row in swept}) < 2:
        return []
    lines = {
        f"gamma={gamma}": [(row["settings"]["ratio"], row) for row in rows]
        for gamma, rows in _by(swept, lambda row: row["settings"]["gamma"])
    }
    share = "share of the cache read by a draft step"
    return [
        _lines(SPEED, share, lines, lambda row: row["tokens_per_second"]["median"]),
        _lines(
            "drafted tokens accepted per round", share, lines, lambda row: row["tau_without_bonus"]
        ),
    ]


def _lengths(records: Sequence[Record]) -> list[Panel]:
    """Show acceptance and speed-up at each length of a long generation, a line per row."""
    drafted = [row for row in records if row.get("lengths") and row["conditional_acceptance"]]
    lines = {
        _place(row): [(one["new_tokens"], {**row, **one}) for one in row["lengths"]]
        for row in drafted
    }
    if not lines:
        return []

    def alpha(row: Record) -> float:
        return row["tau_without_bonus"] / len(row["conditional_acceptance"])

    at, faster = "tokens generated", []
    if all(PLAIN in reached["speedup"] for row in drafted for reached in row["lengths"]):
        faster = [_lines("times plain decoding", at, lines, lambda row: row["speedup"][PLAIN])]
    return [_lines("share of a draft's levels that is accepted", at, lines, alpha), *faster]


def _lines(
    title: str,
    over: str,
    lines: dict[str, list[tuple[float, Record]]],
    value: Callable[[Record], float],
) -> Panel:
    """Return a panel with a line for each name, over what its rows stand at."""

    def fill(axis: Any) -> None:
        for name, rows in lines.items():
            at = [place for place, _ in rows]
            axis.plot(at, [value(row) for _, row in rows], marker="o", label=name)
        axis.set_xlabel(over)
        axis.set_ylim(bottom=0)

    return title, fill


def _place(row: Record) -> str:
    return f"{label(row)}, {size(row['context'])}"


def _parts(records: Sequence[Record]) -> list[Panel]:
    """Where a round's time goes, a bar per row that itemises its drafting; points are rounds."""
    itemised = [row for row in records if drafting(row)]

    def fill(rows: Sequence[Record], axis: Any) -> None:
        places, before = range(len(rows)), [0.0] * len(rows)
        for name in drafting(rows[0]) | dict.fromkeys(("target", "accept")):
            own = [(row["round_seconds"] | drafting(row))[name] * 1e3 for row in rows]
            axis.barh(places, own, 0.8, before, label=name)
            before = [so_far + more for so_far, more in zip(before, own, strict=True)]
        axis.set_yticks(places, [label(row) for row in rows], fontsize=6)
        axis.invert_yaxis()
        axis.set_xlabel("ms per round")
        counted = axis.twiny()
        counted.plot([row["rounds"] for row in rows], places, "k.")
        counted.set_xlim(left=0)
        counted.set_xlabel("rounds (points)")

    return _panels(itemised, fill)


_PANELS = {
    "speed": _speed,
    "acceptance": _acceptance,
    "sweep": _sweep,
    "lengths": _lengths,
    "parts": _parts,
}


def _panels(
    records: Sequence[Record], fill: Callable[[Sequence[Record], Any], None]
) -> list[Panel]:
    panels = sorted(
        _by(records, lambda row: (row["batch"], row["temperature"])), key=lambda panel: panel[0]
    )
    return [
        (f"temperature {temperature:g}, batch {batch}", lambda axis, rows=rows: fill(rows, axis))
        for (batch, temperature), rows in panels
    ]


def _by(records: Iterable[Record], key: Callable[[Record], Any]) -> list[tuple[Any, list[Record]]]:
    """Return records with equal keys together, in the order in which keys appear."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.items())
