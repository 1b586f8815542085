"""Measured rows as text; under simulated acceptance every single line says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.tables import aligned, size

HEADER = (
    ("method", "<"),
    ("context", ">"),
    ("B", ">"),
    ("T", ">"),
    ("tokens/s", ">"),
    ("±", ">"),
    ("x plain", ">"),
    ("x hf", ">"),
    ("tau", ">"),
    ("-bonus", ">"),
    ("draft/target/accept", ">"),
    ("ms/round", ">"),
    ("prefill", ">"),
    ("peak", ">"),
    ("same text", "<"),
)


def lines(text: str, note: str | None) -> str:
    """Return text with the note at the head of every line of it."""
    if note is None:
        return text
    return "\n".join(f"{note} | {line}" for line in text.splitlines())


def say(text: str, note: str | None) -> None:
    """Print text; with the note on every line."""
    print(lines(text, note), flush=True)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return measured rows as text."""
    return aligned(HEADER, [_cells(record) for record in records])


def label(record: dict[str, Any]) -> str:
    """Return a method with its options."""
    return " ".join([record["method"], *(f"{k}={v}" for k, v in record["settings"].items())])


def drafting(record: dict[str, Any]) -> dict[str, float]:
    """Return the seconds per round of the parts of drafting, for methods that itemise it."""
    parts = {
        name.removesuffix("_seconds"): seconds
        for name, seconds in record["details"].items()
        if name.endswith("_seconds")
    }
    scale = record["round_seconds"]["draft"] / sum(parts.values()) if parts else 0.0
    return {name: seconds * scale for name, seconds in parts.items()}


def identity(record: dict[str, Any]) -> str:
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


def differences(records: Sequence[dict[str, Any]]) -> str:
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


def acceptance(records: Sequence[dict[str, Any]]) -> str:
    """Return per-position acceptance of all rows that drafted, as text."""
    drafted = [record for record in records if record.get("per_position_acceptance")]
    if not drafted:
        return ""
    depth = max(len(record["per_position_acceptance"]) for record in drafted)
    header = [("accepted at position", "<"), ("context", ">"), ("B", ">"), ("T", ">"), ("", "<")]
    header += [(str(place + 1), ">") for place in range(depth)]
    rows = []
    for record in drafted:
        place = (label(record), size(record["context"]), str(record["batch"]))
        for name, rates in (
            ("of all rounds", record["per_position_acceptance"]),
            ("pos-acc", record["conditional_acceptance"]),
        ):
            cells = [f"{rate:.0%}" for rate in rates] + [""] * (depth - len(rates))
            rows.append((*place, f"{record['temperature']:g}", name, *cells))
    return aligned(header, rows)


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    place = (
        label(record),
        size(record["context"]),
        str(record["batch"]),
        f"{record['temperature']:g}",
    )
    if record["fault"]:
        return (*place, "FAILED", *[""] * (len(HEADER) - len(place) - 2), record["fault"])
    speed, rounds, speedup = record["tokens_per_second"], record["round_seconds"], record["speedup"]
    split = "-"
    if rounds is not None:
        parts = (rounds[part] for part in ("draft", "target", "accept"))
        split = " / ".join(f"{part / rounds['total']:.0%}" for part in parts)
    return (
        *place,
        f"{speed['median']:.1f}",
        f"{speed['spread']:.0%}",
        _or_dash(speedup.get("plain"), "{:.2f}"),
        _or_dash(speedup.get("transformers"), "{:.2f}"),
        _or_dash(record["tau"], "{:.2f}"),
        _or_dash(record["tau_without_bonus"], "{:.2f}"),
        split,
        _or_dash(rounds and rounds["total"] * 1e3, "{:.1f}"),
        _or_dash(record["prefill_seconds"], "{:.2f} s"),
        _or_dash(record["peak_bytes"] and record["peak_bytes"] / 2**30, "{:.2f} GiB"),
        identity(record),
    )


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
