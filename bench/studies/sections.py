"""What a suite is made of: a paper's tables, and the columns that they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decoding import passes
from decoding.cases import PLAIN, Entry, Group
from decoding.measure import Plan
from decoding.show import aligned, label, size

from .papers import published, source

Record = dict[str, Any]
Theirs = tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """How large a suite is on this machine.

    Attributes
    ----------
    short, long : int
        Tokens of a prompt where the paper's are short, and where they are long.
    entries : tuple of Entry
        Methods with the options of this model, such as where its drafter lies.
    """

    short: int
    long: int
    entries: tuple[Entry, ...] = ()

    def entry(self, name: str, **options: Any) -> Entry:
        """Return a method with the options that it was given, and then these."""
        given = next((entry.options for entry in self.entries if entry.name == name), {})
        return Entry(name, {**given, **options})


@dataclass(frozen=True)
class Section:
    """One table or figure of a paper.

    Attributes
    ----------
    name, title : str
        As in the paper.
    groups : list of Group
        What is measured for it; none where it can only be referred to.
    columns : dict of str to callable
        What is shown of a measured row.
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
    """

    name: str
    title: str
    groups: list[Group] = field(default_factory=list)
    columns: dict[str, Callable[[Record], str]] = field(default_factory=dict)
    theirs: list[Theirs] = field(default_factory=list)
    note: str = ""
    longer: int = 1
    lengths: tuple[float, ...] = ()
    passes: int = 0
    pictures: tuple[str, ...] = ()
    rows_of: str = ""

    def rows(self, records: Sequence[Record]) -> list[Record]:
        """Return the rows of a file that it shows."""
        return [one for one in records if one["section"] == (self.rows_of or self.name)]

    def plan(self, plan: Plan) -> Plan:
        """Return how its groups are measured."""
        new_tokens = plan.new_tokens * self.longer
        lengths = tuple(max(1, round(share * new_tokens)) for share in self.lengths)
        return replace(plan, new_tokens=new_tokens, lengths=lengths)

    def text(self, records: Sequence[Record], paper: str, timed: Sequence[Record] = ()) -> str:
        """Return the section as text: ours, then the paper's, each row saying which it is."""
        heading = f"{self.name}: {self.title}"
        header = [("", "<"), ("", "<"), *((name, ">") for name in self.columns)]
        rows = [
            ("here", _place(record))
            + tuple("FAILED" if record["fault"] else show(record) for show in self.columns.values())
            for whole in records
            for record in (at_lengths(whole) if self.lengths else [whole])
        ]
        rows = [row for row in rows if set(row[2:]) != {"-"}]
        rows += [("paper", *theirs) for theirs in self.theirs]
        parts = [heading, aligned(header, rows) if rows else "", self._overhead(timed), self.note]
        if self.theirs:
            parts.append(f"paper: {source(paper)}")
        return "\n".join(filter(None, parts))

    def _overhead(self, timed: Sequence[Record]) -> str:
        if not timed:
            return ""
        seconds = {one["name"]: one["time"]["median"] for one in timed}
        found = passes.selection_overhead(seconds, self.passes)
        ours = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
        theirs = published("vegas", "Figure 10b")
        low, high = theirs.pop("Vegas, lowest and highest")
        others = ", ".join(f"{name} {percent}%" for name, percent in theirs.items())
        return (
            f"here, passes by themselves at {size(timed[0]['context'])}: selecting adds to a round "
            f"{ours}\n(paper: Vegas {low}% to {high}%, {others})"
        )


def at_lengths(record: Record) -> list[Record]:
    """Return a row as it stood at each of its lengths; itself if it has none."""
    return [{**record, **reached} for reached in record.get("lengths", ())] or [record]


def _place(record: Record) -> str:
    """Return which row it is: method, sampling, prompt, and how much was generated after it."""
    shaping = [f"{name}={value}" for name, value in record.get("shaping", {}).items()]
    generated = [f"{size(record['new_tokens'])} new"] if "seconds" in record else []
    return ", ".join([label(record), *shaping, size(record["context"]), *generated])


def figures(values: Sequence[float]) -> tuple[str, ...]:
    """Return a paper's figures as text."""
    return tuple(f"{value:.2f}" for value in values)


def speed(record: Record) -> str:
    """Return tokens per second, without prefill."""
    return f"{record['tokens_per_second']['median']:.1f}"


def batch(record: Record) -> str:
    """Return how many requests ran at once."""
    return str(record["batch"])


def tau(record: Record) -> str:
    """Return tokens per round, bonus token included."""
    return "1.00" if record["tau"] is None else f"{record['tau']:.2f}"


def conditional(record: Record) -> str:
    """Return the rates by position, given that all before was accepted, in percent."""
    return " ".join(f"{100 * rate:.0f}" for rate in record["conditional_acceptance"])


def accepted(record: Record) -> str:
    """Return the drafted tokens that a round accepts."""
    return f"{record['tau_without_bonus']:.2f}"


def over_plain(record: Record) -> str:
    """Return how many times as fast as plain decoding it is."""
    ratio = record["speedup"].get(PLAIN)
    return "-" if ratio is None else f"{ratio:.2f}"


def minutes(record: Record) -> str:
    """Return the minutes that decoding takes, without prefill."""
    if PLAIN not in record["speedup"]:
        return "-"
    return f"{record['seconds'] * record['new_tokens'] / 60:.2f}"


def plain_minutes(record: Record) -> str:
    """Return the minutes that plain decoding takes for as many tokens."""
    ratio = record["speedup"].get(PLAIN)
    return "-" if ratio is None else minutes({**record, "seconds": ratio * record["seconds"]})


def part(name: str) -> Callable[[Record], str]:
    """Return a column of a round's part in milliseconds."""
    return lambda record: f"{record['round_seconds'][name] * 1e3:.2f}"


def alpha(record: Record) -> str:
    """Return the share of a draft's levels that is accepted (TokenSwift, equation 4)."""
    levels = len(record["per_position_acceptance"] or ())
    return f"{record['tau_without_bonus'] / levels:.2f}" if levels else "-"


def beta(record: Record) -> str:
    """Return the share of a draft's levels that an n-gram had offered and that was accepted."""
    share = record["details"].get("n-gram acceptance, beta")
    return "-" if share is None else f"{share:.2f}"


def distinct(n: int) -> Callable[[Record], str]:
    """Return a column of Distinct-n; 0 is the mean of all."""

    def show(record: Record) -> str:
        shares = record["distinct"]
        if shares is None:
            return "-"
        return f"{shares[n - 1] if n else sum(shares) / len(shares):.2f}"

    return show
