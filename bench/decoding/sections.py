"""Tables: what is measured for one, what is shown of a row, what a paper prints beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from common.records import Record
from common.tables import aligned, size

from . import passes
from .cases import PLAIN, Group
from .measure import MeasurePlan
from .show import drafting, label


@dataclass(frozen=True)
class Section:
    """One table or figure of a paper; without a name, all that was asked for on the command line.

    Attributes
    ----------
    name, title : str
        As in the paper.
    groups : list of Group
        What is measured for it; none where it can only be referred to.
    columns : sequence of str
        What is shown of a measured row, of `COLUMNS`.
    theirs : list of tuple of str
        The paper's rows: a label, then the columns.
    note : str
        How far the two can be compared, or why nothing is measured.
    longer : int
        How many times the usual number of new tokens.
    lengths : tuple of float
        Shares of the new tokens at which a row is shown, each in a line of its own.
    passes : int
        Gamma of the passes that are timed one by one for it; 0 for none.
    pictures : tuple of str
        Of `pictures.KINDS`.
    rows_of : str
        The section that measures the rows it shows, where that is another one.
    source : str
        The paper, its version and its machine.
    """

    name: str
    title: str
    groups: list[Group] = field(default_factory=list)
    columns: Sequence[str] = ()
    theirs: list[tuple[str, ...]] = field(default_factory=list)
    note: str = ""
    longer: int = 1
    lengths: tuple[float, ...] = ()
    passes: int = 0
    pictures: tuple[str, ...] = ()
    rows_of: str = ""
    source: str = ""

    def rows(self, records: Sequence[Record]) -> list[Record]:
        """Return the rows of a file that it shows."""
        return [one for one in records if one["section"] == (self.rows_of or self.name)]

    def plan(self, plan: MeasurePlan) -> MeasurePlan:
        """Return how its groups are measured."""
        new_tokens = plan.new_tokens * self.longer
        lengths = tuple(max(1, round(share * new_tokens)) for share in self.lengths)
        return replace(plan, new_tokens=new_tokens, lengths=lengths)

    def text(self, records: Sequence[Record], timed: Sequence[Record] = ()) -> str:
        """Return the section as text: ours, then the paper's, each row saying which it is."""
        header = [("", "<"), ("", "<"), *((name, ">") for name in self.columns)]
        rows = [
            ("here", _place(record), *(_cell(name, record) for name in self.columns))
            for whole in records
            for record in (_at_lengths(whole) if self.lengths else [whole])
        ]
        rows = [row for row in rows if set(row[2:]) != {"-"}]
        rows += [("paper", *theirs) for theirs in self.theirs]
        table = aligned(header, rows) if rows else ""
        parts = [f"{self.name}: {self.title}", table, self._overhead(timed), self.note]
        if self.theirs:
            parts.append(f"paper: {self.source}")
        return "\n".join(filter(None, parts))

    def _overhead(self, timed: Sequence[Record]) -> str:
        if not timed:
            return ""
        seconds = {one["name"]: one["time"]["median"] for one in timed}
        found = passes.selection_overhead(seconds, self.passes)
        ours = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
        context = size(timed[0]["context"])
        return f"here, passes by themselves at {context}: selecting adds to a round {ours}"


def figures(values: Sequence[float]) -> tuple[str, ...]:
    """Return a paper's figures as text."""
    return tuple(f"{value:.2f}" for value in values)


def _at_lengths(record: Record) -> list[Record]:
    """Return a row as it stood at each of its lengths; itself if it has none."""
    return [{**record, **reached} for reached in record.get("lengths", ())] or [record]


def _place(record: Record) -> str:
    """Return which row it is: method, sampling, prompt, and how much was generated after it."""
    shaping = [f"{name}={value}" for name, value in record.get("shaping", {}).items()]
    generated = [f"{size(record['new_tokens'])} new"] if "seconds" in record else []
    return ", ".join([label(record), *shaping, size(record["context"]), *generated])


def _cell(column: str, record: Record) -> str:
    return "FAILED" if record["fault"] else COLUMNS[column](record)


def _part(name: str) -> Callable[[Record], str]:
    return lambda record: f"{record['round_seconds'][name] * 1e3:.2f}"


def _over_plain(record: Record) -> str:
    ratio = record["speedup"].get(PLAIN)
    return "-" if ratio is None else f"{ratio:.2f}"


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
    share = record["details"].get("n-gram acceptance, beta")
    return "-" if share is None else f"{share:.2f}"


def _distinct(*orders: int) -> Callable[[Record], str]:
    """Return a column of the mean of some Distinct-n."""

    def show(record: Record) -> str:
        shares = record["distinct"]
        return f"{sum(shares[n - 1] for n in orders) / len(orders):.2f}" if shares else "-"

    return show


def _rates(record: Record) -> str:
    return " ".join(f"{100 * rate:.0f}" for rate in record["conditional_acceptance"])


def _rate(place: int) -> Callable[[Record], str]:
    return lambda record: f"{record['conditional_acceptance'][place]:.1%}"


def _tree_building(record: Record) -> str:
    return f"{drafting(record).get('tree', 0.0) / record['round_seconds']['total']:.1%}"


COLUMNS: dict[str, Callable[[Record], str]] = {
    "tokens/s": lambda record: f"{record['tokens_per_second']['median']:.1f}",
    "x plain": _over_plain,
    "B": lambda record: str(record["batch"]),
    "T": lambda record: f"{record['temperature']:g}",
    "tau": lambda record: "1.00" if record["tau"] is None else f"{record['tau']:.2f}",
    "accepted": lambda record: f"{record['tau_without_bonus']:.2f}",
    "given all before, %": _rates,
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
    "tree building": _tree_building,
    "peak MiB": lambda record: (
        "-" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**20:.0f}"
    ),
}
"""What a table shows of a row: "alpha" and "beta" are TokenSwift's, "D1" to "D4" Distinct-n."""
