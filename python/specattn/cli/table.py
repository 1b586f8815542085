"""The figures of one or several runs, a line for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specattn.cli.terminal import console, say

if TYPE_CHECKING:
    from specattn.cli.session import Continuation, DecodingSession

_MEANINGS = {
    "tokens/s": "tokens/s without prefill",
    "speed-up": "speed-up over the first method",
    "passes": "passes of the full target",
    "per pass": "tokens per pass, bonus token included",
    "accepted": "accepted of the drafted tokens",
}


def figures(one: Continuation, first: Continuation | None) -> dict[str, str]:
    """Return the figures of a run by their names; its speed-up is over the `first`, if given."""
    found, total = one.statistics, one.statistics.total
    base = 0.0 if first is None else first.statistics.tokens_per_second
    return {
        "tokens/s": f"{found.tokens_per_second:.1f}",
        **({"speed-up": f"{found.tokens_per_second / base:.2f}"} if base else {}),
        "new": f"{total.new_tokens}",
        "passes": f"{found.passes}",
        "per pass": f"{total.mean_acceptance_length:.2f}",
        "accepted": f"{total.acceptance_rate:.0%}" if total.drafted else "-",
        "prefill": f"{found.prefill_seconds:.2f} s",
    }


def legend(names: Iterable[str]) -> str:
    """Return what figures of these names mean."""
    return "; ".join(_MEANINGS[name] for name in names if name in _MEANINGS)


def aligned(rows: Sequence[dict[str, str]], left: int = 1) -> list[str]:
    """Return a line of names and one for each row, `left` columns on the left; nothing is cut."""
    table = [[*rows[0]], *([*row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = "<" * left + ">" * (len(widths) - left)
    return [
        "  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, widths, strict=True))
        for row in table
    ]


def print_table(rows: Sequence[dict[str, str]]) -> None:
    """Print rows under their names, which are bold."""
    for number, line in enumerate(aligned(rows)):
        say(line, style=None if number else "bold")


def print_figures(session: DecodingSession, runs: dict[str, Continuation]) -> None:
    """Print a line for each run; details too with --explain, or of a run alone."""
    read = " + ".join(f"{len(prompt.tokens)}" for prompt in session.prompts)
    files = ", ".join(prompt.file.rpartition("/")[2] for prompt in session.prompts)
    say(f"{read} prompt tokens of {files}")
    first = next(iter(runs.values())) if len(runs) > 1 else None
    rows = [figures(one, first) for one in runs.values()]
    room = console.width - 2 - len(aligned(rows, left=0)[0])
    # A method whose options have no room is numbered, and spelled out below.
    names = [
        method if len(method) <= room or ":" not in method else f"{method.partition(':')[0]} {n}"
        for n, method in enumerate(runs, start=1)
    ]
    print_table([{"method": name, **row} for name, row in zip(names, rows, strict=True)])
    for name, method in zip(names, runs, strict=True):
        if name != method:
            say(f"{name}: {method}")
    console.print(legend(rows[0]), style="dim")
    explain = session.options.explain
    for name, (method, one) in zip(names, runs.items(), strict=True):
        if explain or len(runs) == 1:
            details = "; ".join(f"{label}: {value}" for label, value in _details(one).items())
            console.print(f"{name}; {details}", markup=False)
        if explain:
            _print_explanations(one, method.partition(":")[0])


def _details(one: Continuation) -> dict[str, str]:
    """Return what the line of figures has no room for, by its label."""
    found = one.statistics
    parts = (found.draft_seconds, found.target_seconds, found.accept_seconds)
    split = "/".join(f"{100 * part / (found.decode_seconds or 1):.0f}" for part in parts)
    # Of several texts, the least varied one.
    varied = zip(*(text.distinct for text in one.texts), strict=True)
    details = {
        "decode": f"{found.decode_seconds:.2f} s",
        "draft/target/accept": f"{split}%",
        "distinct 1, 2, 3, 4": " ".join(f"{min(each):.2g}" for each in varied),
    }
    if rates := found.total.position_rates:
        details["% accepted at 1, 2, ..."] = " ".join(f"{100 * rate:.0f}" for rate in rates)
    own = {label: value for label, value in found.details.items() if value is not None}
    return details | {
        label: _detail(value) for label, value in own.items() if not isinstance(value, dict)
    }


def _print_explanations(one: Continuation, method: str) -> None:
    """Print what a method has by drafter or size, a table for all that have the same."""
    by_keys = dict[tuple[str, ...], dict[str, dict[str, Any]]]()
    for label, value in {**one.statistics.by_drafter(method), **one.statistics.details}.items():
        if isinstance(value, dict) and value:
            by_keys.setdefault(tuple(value), {})[label] = value
    for keys, columns in by_keys.items():
        print_table(
            [{"": key, **{name: _detail(x[key]) for name, x in columns.items()}} for key in keys]
        )


def _detail(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
