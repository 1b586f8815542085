"""Pictures of measured rows: speed by context, acceptance by position, and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common import pictures
from common.pictures import Panel
from common.records import Record, label
from common.tables import size

from .cases import PLAIN
from .columns import drafting

SPEED = "tokens/s, without prefill"
Lines = dict[str, list[tuple[float, Record]]]
"""A line for each name, over what its rows stand at."""


def draw(
    records: Sequence[Record], folder: Path, note: str | None, kinds: Sequence[str], prefix: str
) -> list[Path]:
    """Draw what rows without a fault show; return the files. Raises as `common.pictures.draw`."""
    right = [record for record in records if not record["fault"]]
    return [
        path
        for kind in kinds
        for path in pictures.draw(
            _PANELS[kind](right), folder / f"{prefix}{kind}.png", note, color="red"
        )
    ]


def _speed(rows: Sequence[Record], axes: Any) -> None:
    """Tokens per second by context, a bar per method."""
    contexts, methods = sorted({row["context"] for row in rows}), _by(rows, label)
    width = 0.8 / len(methods)
    for number, (name, own) in enumerate(methods):
        speeds = [row["tokens_per_second"] for row in own]
        axes.bar(
            [contexts.index(row["context"]) + (number + 0.5) * width - 0.4 for row in own],
            [speed["median"] for speed in speeds],
            width,
            yerr=[speed["median"] * speed["spread"] / 2 for speed in speeds],
            capsize=2,
            label=name,
        )
    axes.set_xticks(range(len(contexts)), [size(context) for context in contexts])
    axes.set(xlabel="context, tokens", ylabel=SPEED)


def _acceptance(rows: Sequence[Record], axes: Any) -> None:
    """Rates given that all before was accepted."""
    for row in rows:
        rates = row["conditional_acceptance"]
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=_place(row))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="position in the draft", ylabel="accepted, given all before", ylim=(0, 1))


def _parts(rows: Sequence[Record], axes: Any) -> None:
    """Where a round's time goes, a bar per row that itemises its drafting; points are rounds."""
    places, before = range(len(rows)), [0.0] * len(rows)
    for name in drafting(rows[0]) | dict.fromkeys(("target", "accept")):
        own = [(row["round_seconds"] | drafting(row))[name] * 1e3 for row in rows]
        axes.barh(places, own, 0.8, before, label=name)
        before = [so_far + more for so_far, more in zip(before, own, strict=True)]
    axes.set_yticks(places, [label(row) for row in rows], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("ms per round")
    counted = axes.twiny()
    counted.plot([row["rounds"] for row in rows], places, "k.")
    counted.set_xlim(left=0)
    counted.set_xlabel("rounds (points)")


def _sweep(records: Sequence[Record]) -> list[Panel]:
    """Speed, and accepted tokens, over the share of the cache that is read; a line per gamma."""
    swept = [row for row in records if {"gamma", "ratio"} <= row["settings"].keys()]
    swept.sort(key=lambda row: row["settings"]["ratio"])
    if len({row["settings"]["ratio"] for row in swept}) < 2:
        return []
    lines: Lines = {
        f"gamma={gamma}": [(row["settings"]["ratio"], row) for row in rows]
        for gamma, rows in _by(swept, lambda row: row["settings"]["gamma"])
    }
    share = "share of the cache read by a draft step"
    accepted = "drafted tokens accepted per round"
    return [
        _lines(SPEED, share, lines, lambda row: row["tokens_per_second"]["median"]),
        _lines(accepted, share, lines, lambda row: row["tau_without_bonus"]),
    ]


def _lengths(records: Sequence[Record]) -> list[Panel]:
    """Show acceptance and speed-up at each length of a long generation, a line per row."""
    drafted = [row for row in records if row.get("lengths") and row["conditional_acceptance"]]
    lines: Lines = {
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


def _lines(title: str, over: str, lines: Lines, value: Callable[[Record], float]) -> Panel:
    def fill(axes: Any) -> None:
        for name, rows in lines.items():
            at = [place for place, _ in rows]
            axes.plot(at, [value(row) for _, row in rows], marker="o", label=name)
        axes.set_xlabel(over)
        axes.set_ylim(bottom=0)

    return title, fill


def _place(row: Record) -> str:
    return f"{label(row)}, {size(row['context'])}"


def _each(
    fill: Callable[[Sequence[Record], Any], None], shown: Callable[[Record], Any] = bool
) -> Callable[[Sequence[Record]], list[Panel]]:
    """Return what makes a panel for each batch and temperature of the rows that can be shown."""

    def panels(records: Sequence[Record]) -> list[Panel]:
        groups = _by(filter(shown, records), lambda row: (row["batch"], row["temperature"]))
        return [
            (
                f"temperature {temperature:g}, batch {batch}",
                lambda axes, rows=rows: fill(rows, axes),
            )
            for (batch, temperature), rows in sorted(groups, key=lambda group: group[0])
        ]

    return panels


_PANELS: dict[str, Callable[[Sequence[Record]], list[Panel]]] = {
    "speed": _each(_speed),
    "acceptance": _each(_acceptance, lambda row: row["conditional_acceptance"]),
    "sweep": _sweep,
    "lengths": _lengths,
    "parts": _each(_parts, drafting),
}
KINDS = tuple(_PANELS)


def _by(records: Iterable[Record], key: Callable[[Record], Any]) -> list[tuple[Any, list[Record]]]:
    """Return records with equal keys together, in the order in which keys appear."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.items())
