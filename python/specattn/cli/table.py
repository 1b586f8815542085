"""The figures of one or several continuations, a line for each method."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from specattn.cli.session import Continuation, DecodingSession
from specattn.cli.terminal import console
from specattn.decoding import Statistics


def print_figures(
    session: DecodingSession, continuations: dict[str, Continuation], explain: bool = False
) -> None:
    """Print one line for each continuation in each of two tables, and what methods add.

    To `explain` adds the figures by which a method decided: those that it has by drafter or size.
    """
    read = " + ".join(f"{len(prompt.tokens)}" for prompt in session.prompts)
    files = ", ".join(prompt.file.rpartition("/")[2] for prompt in session.prompts)
    console.print(f"{read} prompt tokens of {files}", soft_wrap=True, markup=False)
    speed = _table("tokens/s", "new", "passes", "per pass", "time split", "decode")
    more = _table("prefill", "distinct 1, 2, 3, 4", "accepted at 1, 2, ...")
    for method, one in continuations.items():
        found = one.statistics
        speed.add_row(
            Text(method),
            f"{found.tokens_per_second:.1f}",
            f"{found.total.new_tokens}",
            f"{found.passes}",
            f"{found.total.mean_acceptance_length:.2f}",
            _split(found),
            f"{found.decode_seconds:.2f} s",
        )
        # Of several texts, the least varied one.
        shares = " ".join(f"{min(each):.2g}" for each in zip(*_distinct(one), strict=True))
        rates = " ".join(f"{100 * rate:.0f}" for rate in found.total.position_rates)
        more.add_row(Text(method), f"{found.prefill_seconds:.2f} s", shares, rates)
    for table in (speed, more):
        console.print(table)
    console.print(_LEGEND, style="dim")
    for method, one in continuations.items():
        details = [
            f"{label}: {_detail(value)}"
            for label, value in one.statistics.details.items()
            if not (value is None or isinstance(value, dict))
        ]
        if details:
            console.print(f"{method}; {'; '.join(details)}", markup=False)
        if explain:
            for table in _explanations(one.statistics, method.partition(":")[0]):
                console.print(table)


_LEGEND = """\
tokens/s, without prefill; full passes of the target; mean acceptance length per
pass, with bonus; time split in %: draft / target / accept; shares of distinct
n-grams; % of the rounds that accept a token at position 1, 2, ..."""


def _explanations(statistics: Statistics, method: str) -> list[Table]:
    """Return the figures that a method has by something: a table for all that have the same."""
    by_keys = dict[tuple[str, ...], dict[str, dict[str, Any]]]()
    for label, value in {**statistics.by_drafter(method), **statistics.details}.items():
        if isinstance(value, dict) and value:
            by_keys.setdefault(tuple(value), {})[label] = value
    tables = []
    for keys, columns in by_keys.items():
        table = _table(*columns, first="")
        for key in keys:
            table.add_row(key, *(_detail(column[key]) for column in columns.values()))
        tables.append(table)
    return tables


def _table(*columns: str, first: str = "method") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True, max_width=24)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _distinct(one: Continuation) -> list[list[float]]:
    return [text.distinct for text in one.texts]


def _split(statistics: Statistics) -> str:
    parts = (statistics.draft_seconds, statistics.target_seconds, statistics.accept_seconds)
    whole = statistics.decode_seconds or 1
    return "/".join(f"{100 * part / whole:.0f}" for part in parts)


def _detail(value: Any) -> str:
    """Return what a method says of its run, as text."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
