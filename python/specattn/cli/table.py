"""The figures of one or several continuations, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from specattn.cli.session import Continuation, DecodingSession
from specattn.cli.terminal import console
from specattn.decoding import Statistics


def print_figures(session: DecodingSession, continuations: dict[str, Continuation]) -> None:
    """Print a column for each continuation."""
    name = session.options.prompt_file.name
    table = Table(title=f"{len(session.prompt)} prompt tokens of {name}")
    table.add_column()
    for method in continuations:
        table.add_column(method.replace(":", ":\n", 1), justify="right")
    found = continuations.values()
    for label, value in _ROWS:
        table.add_row(label, *(value(one.statistics) for one in found))
    table.add_row("distinct 1-, 2-, 3-, 4-grams", *(_shares(one.distinct) for one in found))
    details = [one.statistics.details for one in found]
    for label in dict.fromkeys(label for own in details for label in own):
        table.add_row(label, *(_detail(own.get(label)) for own in details))
    console.print(table)


def _detail(value: Any) -> str:
    """Return what a method says of its run, as text."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _percent(rate: float) -> str:
    return f"{100 * rate:.0f}%"


def _shares(shares: list[float]) -> str:
    return " ".join(f"{share:.2g}" for share in shares)


def _rates(rates: list[float]) -> str:
    return " ".join(map(_percent, rates)) or "-"


def _split(statistics: Statistics) -> str:
    parts = (statistics.draft_seconds, statistics.target_seconds, statistics.accept_seconds)
    return " / ".join(_percent(part / (statistics.decode_seconds or 1)) for part in parts)


_ROWS: tuple[tuple[str, Callable[[Statistics], str]], ...] = (
    ("tokens/s, without prefill", lambda s: f"{s.tokens_per_second:.1f}"),
    ("new tokens", lambda s: f"{s.total.new_tokens}"),
    ("full passes of the target", lambda s: f"{s.passes}"),
    ("mean acceptance length, with bonus", lambda s: f"{s.total.mean_acceptance_length:.2f}"),
    ("accepted at position 1, 2, ...", lambda s: _rates(s.total.position_rates)),
    ("time: draft / target / accept", _split),
    ("prefill, seconds", lambda s: f"{s.prefill_seconds:.2f}"),
    ("decode, seconds", lambda s: f"{s.decode_seconds:.2f}"),
)
