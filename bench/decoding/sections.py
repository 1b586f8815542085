"""Tables: what is measured for one, what is shown of a row, what a paper prints beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.records import Record, label
from common.tables import aligned, size

from . import passes
from .cases import Group
from .columns import cells
from .measure import MeasurePlan


@dataclass(frozen=True)
class Section:
    """A table or figure of a paper; without a name, what was asked for on the command line."""

    name: str
    title: str
    groups: list[Group] = field(default_factory=list)  # none where it can only be referred to
    columns: Sequence[str] = ()  # of `columns.COLUMNS`
    theirs: list[tuple[str, ...]] = field(default_factory=list)  # a label, then its columns
    note: str = ""  # how far the two can be compared, or why nothing is measured
    longer: int = 1  # how many times the usual number of new tokens
    lengths: tuple[float, ...] = ()  # shares of the new tokens at which a row is shown, a line each
    passes: int = 0  # gamma of the passes that are timed one by one for it; 0 for none
    pictures: tuple[str, ...] = ()  # of `pictures.KINDS`
    rows_of: str = ""  # the section that measures the rows it shows, where that is another one
    source: str = ""  # the paper, its version and its machine
    workload: str = ""  # of `grounded.KINDS`: what is read instead of the run's own texts
    referenced: bool = False  # whether the workload's written continuations play the target

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
            ("here", _place(record), *cells(record, self.columns))
            for whole in records
            for record in (
                [{**whole, **one} for one in whole.get("lengths", ()) if self.lengths] or [whole]
            )
        ]
        rows = [row for row in rows if set(row[2:]) != {"-"}]
        pads = [""] * len(self.columns)
        rows += [("paper", *(*row, *pads)[: 1 + len(pads)]) for row in self.theirs]
        table = aligned(header, rows) if rows else ""
        source = f"paper: {self.source}" if self.theirs else ""
        parts = f"{self.name}: {self.title}", table, self._overhead(timed), self.note, source
        return "\n".join(filter(None, parts))

    def _overhead(self, timed: Sequence[Record]) -> str:
        if not timed:
            return ""
        seconds = {one["name"]: one["time"]["median"] for one in timed}
        found = passes.selection_overhead(seconds, self.passes)
        ours = ", ".join(f"{name} {share:.1%}" for name, share in found.items())
        context = size(timed[0]["context"])
        return f"here, passes by themselves at {context}: selecting adds to a round {ours}"


def _place(record: Record) -> str:
    """Return which row it is: method, sampling, prompt, and how much was generated after it."""
    shaping = [f"{name}={value}" for name, value in record.get("shaping", {}).items()]
    generated = [f"{size(record['new_tokens'])} new"] if "seconds" in record else []
    return ", ".join([label(record), *shaping, size(record["context"]), *generated])
