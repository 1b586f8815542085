"""The figures of one or several runs, a line for each."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specattn.cli.terminal import console, room, say

if TYPE_CHECKING:
    from specattn.cli.session import Continuation, DecodingSession

_SPEED_UP = "speed-up"
# In this order columns leave a table that is too wide.
_SPARE = ("new", "passes", "prefill", "accepted", "per pass", "total")


def figures(one: Continuation, first: Continuation | None) -> dict[str, str]:
    """Return the figures of a run by their names; its speed-up is over the `first`, if given."""
    found = one.statistics.figures()
    base = 0.0 if first is None else first.statistics.tokens_per_second
    if not base:
        return found
    speed = {"tokens/s": found.pop("tokens/s")}
    return {**speed, _SPEED_UP: f"{one.statistics.tokens_per_second / base:.2f}", **found}


def legend(names: Iterable[str]) -> str:
    """Return what figures of these names mean."""
    from specattn.decoding.text.statistics import MEANINGS

    meanings = {**MEANINGS, _SPEED_UP: "of tokens/s over the first method"}
    return "; ".join(f"{name}: {meanings[name]}" for name in names if name in meanings)


def key_values(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each pair, the values below one another."""
    known = list(pairs)
    width = max((len(name) for name, _ in known), default=0)
    return [f"{name:{width}}  {value}" for name, value in known]


def fitting(
    rows: Sequence[dict[str, str]], spare: Sequence[str], width: int
) -> list[dict[str, str]]:
    """Return rows without as many `spare` columns, in that order, as find no room in a line."""
    kept = list(rows)
    for name in spare:
        if len(aligned(kept, left=0)[0]) <= width:
            break
        kept = [{key: value for key, value in row.items() if key != name} for row in kept]
    return kept


def aligned(rows: Sequence[dict[str, str]], left: int = 1) -> list[str]:
    """Return a line of names and one for each row, `left` columns on the left; nothing is cut."""
    table = [[*rows[0]], *([*row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = ["<" if n < left else ">" for n in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, widths, strict=True))
        for row in table
    ]


def print_table(rows: Sequence[dict[str, str]]) -> None:
    """Print rows under their names, which are bold; the last columns go where there is no room."""
    rows = fitting(rows, [*reversed(rows[0])][:-1], room(sys.stderr))
    for number, line in enumerate(aligned(rows)):
        say(line, style=None if number else "bold")


def print_figures(session: DecodingSession, runs: dict[str, Continuation]) -> None:
    """Print a line of figures for each run; with --explain where its time went, and why."""
    read = " + ".join(f"{len(prompt.tokens)}" for prompt in session.prompts)
    files = ", ".join(prompt.file.rpartition("/")[2] for prompt in session.prompts)
    say("; ".join([f"{read} prompt tokens of {files}", *session.options.unusual_sampling]))
    first = next(iter(runs.values())) if len(runs) > 1 else None
    rows = [figures(one, first) for one in runs.values()]
    wide = room(sys.stderr) - 2  # behind a name
    left = wide - len(aligned(rows, left=0)[0])
    # A method whose options have no room is numbered, and spelled out below.
    names = [
        method if len(method) <= left or ":" not in method else f"{method.partition(':')[0]} #{n}"
        for n, method in enumerate(runs, start=1)
    ]
    rows = fitting(rows, _SPARE, wide - max(map(len, names)))
    print_table([{"method": name, **row} for name, row in zip(names, rows, strict=True)])
    for name, method in zip(names, runs, strict=True):
        if name != method:
            say(f"{name.rpartition(' ')[2]} is {method}")
    for method, one in runs.items():
        if one.statistics.total.drafted == 0 and method != "plain":
            say(f"{method} drafted nothing: {_why_nothing(one)}")
    console.print(legend(rows[0]), style="dim")
    if not session.options.explain:
        return
    for name, (method, one) in zip(names, runs.items(), strict=True):
        details = "; ".join(f"{label}: {value}" for label, value in _details(one).items())
        console.print(f"{name}; {details}", markup=False)
        _print_explanations(one, method.partition(":")[0])


def _why_nothing(one: Continuation) -> str:
    """Return why no round of a run drafted, as far as its figures say."""
    details, count = one.statistics.details, one.statistics.passes
    passes = f"{count} pass" if count == 1 else f"{count} passes"
    _, chose_none, plain = details.get("last choice", "").partition("no draft: plain decoding ")
    if chose_none:
        return f"no draft was expected to pay, by what passes took (plain decoding {plain})"
    if "rounds without a draft" in details and "last choice" not in details:
        return f"{passes} did not tell yet whether drafts pay"
    return f"in {passes} there was nothing to draft from, or no room for a draft"


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
        details["% of all rounds that accept at 1, 2, ..."] = " ".join(
            f"{100 * rate:.0f}" for rate in rates
        )
    if found.graph_bytes:
        details["CUDA graphs"] = f"{found.graph_bytes / 2**20:,.0f} MiB"
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
