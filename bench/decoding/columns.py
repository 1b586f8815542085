"""Measured rows as text; under simulated acceptance every single line says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.records import Record
from common.tables import aligned, or_dash, size

from .cases import PLAIN, TRANSFORMERS
from .peers.engines import ENGINES


def lines(text: str, note: str | None) -> str:
    """Return text with the note at the head of every line of it."""
    if note is None:
        return text
    return "\n".join(f"{note} | {line}" for line in text.splitlines())


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


def label(record: Record) -> str:
    """Return a method with its options."""
    return " ".join([record["method"], *(f"{k}={v}" for k, v in record["settings"].items())])


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
    rows = [
        (label(one), size(one["context"]), *cells(one, FULL), *(_over(one, name) for name in peers))
        for one in records
    ]
    return aligned(header, rows)


def acceptance(records: Sequence[Record]) -> str:
    """Return per-position acceptance of all rows that drafted, as text."""
    drafted = [record for record in records if record.get("per_position_acceptance")]
    if not drafted:
        return ""
    depth = max(len(record["per_position_acceptance"]) for record in drafted)
    header = [("accepted at position", "<"), ("context", ">"), ("B", ">"), ("T", ">"), ("", "<")]
    header += [(str(place + 1), ">") for place in range(depth)]
    rows = []
    for record in drafted:
        place = (label(record), size(record["context"]), *cells(record, ("B", "T")))
        for name, rates in (
            ("of all rounds", record["per_position_acceptance"]),
            ("pos-acc", record["conditional_acceptance"]),
        ):
            shown = [f"{rate:.0%}" for rate in rates] + [""] * (depth - len(rates))
            rows.append((*place, name, *shown))
    return aligned(header, rows)


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


def _over(record: Record, baseline: str) -> str:
    return or_dash((record.get("speedup") or {}).get(baseline))


def _part(name: str) -> Callable[[Record], str]:
    return lambda record: f"{record['round_seconds'][name] * 1e3:.2f}"


def _minutes(record: Record) -> str:
    if PLAIN not in record["speedup"]:
        return "-"
    return f"{record['seconds'] * record['new_tokens'] / 60:.2f}"


def _plain_minutes(record: Record) -> str:
    ratio = record["speedup"].get(PLAIN)
    return "-" if ratio is None else _minutes({**record, "seconds": ratio * record["seconds"]})


def _alpha(record: Record) -> str:
    """Return the share of a draft's levels that is accepted (TokenSwift, equation 4)."""
    levels = len(record["per_position_acceptance"] or ())
    return f"{record['tau_without_bonus'] / levels:.2f}" if levels else "-"


def _beta(record: Record) -> str:
    """Return the share of a draft's levels that an n-gram had offered and that was accepted."""
    return or_dash(record["details"].get("n-gram acceptance, beta"))


def _distinct(*orders: int) -> Callable[[Record], str]:
    """Return a column of the mean of some Distinct-n."""

    def show(record: Record) -> str:
        shares = record["distinct"]
        return f"{sum(shares[n - 1] for n in orders) / len(orders):.2f}" if shares else "-"

    return show


def _rate(place: int) -> Callable[[Record], str]:
    return lambda record: f"{record['conditional_acceptance'][place]:.1%}"


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
    seconds = record["round_seconds"]
    if seconds is None:
        return "-"
    return " / ".join(
        f"{seconds[part] / seconds['total']:.0%}" for part in ("draft", "target", "accept")
    )


COLUMNS: dict[str, Callable[[Record], str]] = {
    "B": lambda record: str(record["batch"]),
    "agrees": lambda record: or_dash(
        record["details"].get("model ranks the reference first"), "{:.0%}"
    ),
    "T": lambda record: f"{record['temperature']:g}",
    "tokens/s": lambda record: f"{record['tokens_per_second']['median']:.1f}",
    "±": lambda record: f"{record['tokens_per_second']['spread']:.0%}",
    "x plain": lambda record: _over(record, PLAIN),
    "x hf": lambda record: _over(record, TRANSFORMERS),
    "tau": lambda record: or_dash(record["tau"]),
    "accepted": lambda record: or_dash(record["tau_without_bonus"]),
    "draft/target/accept": _split,
    "ms/round": lambda record: or_dash(
        record["round_seconds"] and record["round_seconds"]["total"], "{:.1f}", 1e3
    ),
    "prefill": lambda record: or_dash(record["prefill_seconds"], "{:.2f} s"),
    "first token": lambda record: or_dash(record["first_token_seconds"], "{:.2f} s"),
    "peak": lambda record: or_dash(record["peak_bytes"], "{:.2f} GiB", 2**-30),
    "same text": _same_text,
    "given all before, %": lambda record: " ".join(
        f"{100 * rate:.0f}" for rate in record["conditional_acceptance"]
    ),
    **{f"pos-acc {place + 1}": _rate(place) for place in range(8)},
    "alpha": _alpha,
    "beta, whole": _beta,
    **{f"D{n}": _distinct(n) for n in (1, 2, 3, 4)},
    "mean": _distinct(1, 2, 3, 4),
    "min": _minutes,
    "plain, min": _plain_minutes,
    "rounds": lambda record: str(record["rounds"]),
    "draft ms": _part("draft"),
    "target ms": _part("target"),
    "accept ms": _part("accept"),
    "catch-up ms": lambda record: f"{drafting(record).get('catch_up', 0.0) * 1e3:.2f}",
    "tree building": lambda record: (
        f"{drafting(record).get('tree', 0.0) / record['round_seconds']['total']:.1%}"
    ),
    "peak MiB": lambda record: or_dash(record["peak_bytes"], "{:.0f}", 2**-20),
}
"""What a table shows of a row: "alpha" and "beta" are TokenSwift's, "D1" to "D4" Distinct-n."""
FULL = (
    *("B", "T", "tokens/s", "±", "x plain", "x hf", "tau", "accepted", "draft/target/accept"),
    *("ms/round", "prefill", "first token", "peak", "same text"),
)
"""The columns of a run that is no paper's."""
