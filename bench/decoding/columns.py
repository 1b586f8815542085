"""Measured rows as text; under simulated acceptance every single line says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common.records import Record, label
from common.tables import aligned, or_dash, size

from .cases import PLAIN, TRANSFORMERS
from .peers.engines import ENGINES


def lines(text: str, note: str | None) -> str:
    """Return text with the note at the head of every line of it."""
    return text if note is None else "\n".join(f"{note} | {line}" for line in text.splitlines())


def say(text: str, note: str | None) -> None:
    """Print text; with the note on every line."""
    print(lines(text, note), flush=True)


def by_note(records: Sequence[Record]) -> dict[str | None, list[Record]]:
    """Return rows by what every line about them has to say; None where all was measured."""
    found: dict[str | None, list[Record]] = {}
    for one in records:
        note = None if one["acceptance"] == "measured" else one["acceptance"]
        found.setdefault(note, []).append(one)
    return found


def drafting(record: Record) -> dict[str, float]:
    """Return the seconds per round of the parts of drafting, for methods that itemise it."""
    parts = {
        name.removesuffix("_seconds"): seconds
        for name, seconds in record.get("details", {}).items()
        if name.endswith("_seconds")
    }
    scale = record["round_seconds"]["draft"] / sum(parts.values()) if parts else 0.0
    return {name: seconds * scale for name, seconds in parts.items()}


def cells(record: Record, columns: Sequence[str]) -> list[str]:
    """Return what some columns show of a row."""
    return ["FAILED" if record.get("fault") else COLUMNS[name](record) for name in columns]


def table(records: Sequence[Record]) -> str:
    """Return rows with all their figures, and how they stand to each engine that was measured."""
    peers = dict.fromkeys(label(one) for one in records if one["method"] in ENGINES)
    header = [("method", "<"), ("context", ">"), *((name, ">") for name in FULL)]
    header += [(f"x {name}", ">") for name in peers]
    rows = []
    for one in records:
        over = (_figure("speedup", name)(one) for name in peers)
        rows.append((label(one), size(one["context"]), *cells(one, FULL), *over))
    return aligned(header, rows)


def acceptance(records: Sequence[Record]) -> str:
    """Return per-position acceptance of all rows that drafted, as text."""
    drafted = [record for record in records if record.get("per_position_acceptance")]
    if not drafted:
        return ""
    depth = max(len(record["per_position_acceptance"]) for record in drafted)
    header = [("accepted at position", "<"), ("context", ">"), ("B", ">"), ("T", ">"), ("", "<")]
    rows = []
    for record in drafted:
        place = (label(record), size(record["context"]), *cells(record, ("B", "T")))
        for name, figure in (("of all rounds", "per_position"), ("pos-acc", "conditional")):
            shown = [f"{rate:.0%}" for rate in record[f"{figure}_acceptance"]]
            rows.append((*place, name, *shown, *[""] * (depth - len(shown))))
    return aligned(header + [(str(place + 1), ">") for place in range(depth)], rows)


def differences(records: Sequence[Record]) -> str:
    """Return one line for every greedy text that is not plain decoding's, with its logit gap."""
    return "\n".join(
        f"{label(record)}, context {size(record['context'])}: text {one['text']} request "
        f"{one['request']} differs from token {one['position']} on; logit gap {one['gap']:.2g}, "
        f"rounding alone moves logits by {one['noise']:.2g}: "
        + ("a near-tie" if one["near_tie"] else "NOT A NEAR-TIE")
        for record in records
        if record.get("identity")
        for one in record["identity"]["differences"]
    )


def _figure(*path: str | int, form: str = "{:.2f}", scale: float = 1) -> Callable[[Record], str]:
    """Return a column of the figure at a path into a row; a dash where the row has none."""

    def show(record: Record) -> str:
        value: Any = record
        for name in path:
            try:
                value = value[name]
            except (KeyError, IndexError, TypeError):
                return "-"
        return or_dash(value, form, scale)

    return show


def _minutes(record: Record, ratio: float = 1.0) -> str:
    """Return the minutes of what was generated, where plain decoding was measured too."""
    if PLAIN not in record["speedup"]:
        return "-"
    return f"{ratio * record['seconds'] * record['new_tokens'] / 60:.2f}"


def _alpha(record: Record) -> str:
    """Return the share of a draft's levels that is accepted (TokenSwift, equation 4)."""
    levels = len(record["per_position_acceptance"] or ())
    return f"{record['tau_without_bonus'] / levels:.2f}" if levels else "-"


def _distinct(*orders: int) -> Callable[[Record], str]:
    """Return a column of the mean of some Distinct-n."""

    def show(record: Record) -> str:
        shares = record["distinct"]
        return f"{sum(shares[n - 1] for n in orders) / len(orders):.2f}" if shares else "-"

    return show


def _same_text(record: Record) -> str:
    """Say whether greedy text is plain decoding's, and where a tie was decided otherwise."""
    found = record["identity"]
    if found is None:
        return "-"
    if not found["differences"]:
        return f"yes, {found['compared']} of {found['compared']}"
    ties = sum(one["near_tie"] for one in found["differences"])
    wrong = len(found["differences"]) - ties
    parts = [f"near-tie in {ties}"] * bool(ties) + [f"NO in {wrong}"] * bool(wrong)
    return f"{', '.join(parts)} of {found['compared']}"


def _split(record: Record) -> str:
    """Return where a round's time goes."""
    if (seconds := record["round_seconds"]) is None:
        return "-"
    parts = (seconds[part] / seconds["total"] for part in ("draft", "target", "accept"))
    return " / ".join(f"{part:.0%}" for part in parts)


COLUMNS: dict[str, Callable[[Record], str]] = {
    "B": _figure("batch", form="{}"),
    "agrees": _figure("details", "model ranks the reference first", form="{:.0%}"),
    "T": _figure("temperature", form="{:g}"),
    "tokens/s": _figure("tokens_per_second", "median", form="{:.1f}"),
    "±": _figure("tokens_per_second", "spread", form="{:.0%}"),
    "x plain": _figure("speedup", PLAIN),
    "x hf": _figure("speedup", TRANSFORMERS),
    "tau": _figure("tau"),
    "accepted": _figure("tau_without_bonus"),
    "draft/target/accept": _split,
    "ms/round": _figure("round_seconds", "total", form="{:.1f}", scale=1e3),
    "prefill": _figure("prefill_seconds", form="{:.2f} s"),
    "first token": _figure("first_token_seconds", form="{:.2f} s"),
    "peak": _figure("peak_bytes", form="{:.2f} GiB", scale=2**-30),
    "graphs": _figure("graph_bytes", form="{:.0f} MB", scale=1e-6),
    "same text": _same_text,
    "given all before, %": lambda record: " ".join(
        f"{100 * rate:.0f}" for rate in record["conditional_acceptance"]
    ),
    **{
        f"pos-acc {place + 1}": _figure("conditional_acceptance", place, form="{:.1%}")
        for place in range(8)
    },
    "alpha": _alpha,
    "beta, whole": _figure("details", "n-gram acceptance, beta"),
    **{f"D{n}": _distinct(n) for n in (1, 2, 3, 4)},
    "mean": _distinct(1, 2, 3, 4),
    "min": _minutes,
    "plain, min": lambda record: _minutes(record, record["speedup"].get(PLAIN, 1.0)),
    "rounds": _figure("rounds", form="{}"),
    **{
        f"{part} ms": _figure("round_seconds", part, scale=1e3)
        for part in ("draft", "target", "accept")
    },
    "catch-up ms": lambda record: f"{drafting(record).get('catch_up', 0.0) * 1e3:.2f}",
    "tree building": lambda record: (
        f"{drafting(record).get('tree', 0.0) / record['round_seconds']['total']:.1%}"
    ),
    "peak MiB": _figure("peak_bytes", form="{:.0f}", scale=2**-20),
}
"""What a table shows of a row: alpha and beta ("beta, whole") are the shares of a draft's levels
that are accepted, and that an n-gram had offered, in TokenSwift; "D1" to "D4" Distinct-n."""
FULL = (
    *("B", "T", "tokens/s", "±", "x plain", "x hf", "tau", "accepted", "draft/target/accept"),
    *("ms/round", "prefill", "first token", "peak", "graphs", "same text"),
)
"""The columns of a run that is no paper's."""
