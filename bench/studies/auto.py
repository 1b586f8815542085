"""Compare `auto` with every method: cells of text, context and temperature, all methods in turn.

    python bench/studies/auto.py --context 1k,4k,16k --texts 5 --json cells.jsonl
    python bench/studies/auto.py --draw docs/auto.png --json cells.jsonl

A cell is one text; its figures are medians of the repeats, after one run to warm up. Files of the
standard library that the embedded target was not trained on are continued.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import pictures
from common.arguments import Parser
from common.records import Record
from common.tables import aligned, size
from decoding.runs import run

from studies import study

METHODS = ("plain", "auto", "suffix", "prompt_lookup", "vegas", "longspec", "poss", "medusa")
STYLES: dict[str, dict[str, Any]] = {
    "auto": {"color": "black", "linewidth": 2.5, "zorder": 3},
    "plain": {"color": "black", "linestyle": "--"},
}


class Auto(study.Study):
    """A cell has tokens per second of every method, and what `auto` did."""

    defaults = {"method": None, "context": [1024, 4096, 16384], "temperature": [0.0, 1.0]} | {
        "texts": 5, "new_tokens": 192, "repeats": 3, "threads": 2
    }  # fmt: skip
    cells, kind = ("context", "text", "temperature"), "cell"

    @classmethod
    def add_arguments(cls, parser: Parser) -> None:
        """Add the option to draw."""
        parser.add_argument(
            "--draw", type=Path, metavar="FILE", help="draw --json, measure nothing"
        )

    def __init__(self, options: Any):
        if options.draw is not None and options.json is None:
            raise ValueError("--draw needs --json, with cells that were measured")
        options.method = options.method or METHODS
        super().__init__(options)
        if not {"plain", "auto"} <= set(self.methods):
            raise ValueError("--method: plain and auto must be among them")

    def places(self) -> list[Record]:
        """Return the cells; none to draw."""
        return [] if self.options.draw else super().places()

    def measure(self, place: Record) -> Iterator[Record]:
        """Run all methods in turn, in an order that changes with every repeat."""
        snapshot = self.snapshot(place["context"], place["text"])
        speeds: dict[str, list[float]] = {name: [] for name in self.methods}
        shares = ""
        for repeat in range(self.options.repeats + 1):
            for name in list(self.methods)[:: 1 if repeat % 2 else -1]:
                given = self.methods[name], self.options.new_tokens, place["temperature"]
                one = run(snapshot, *given, seed=repeat)
                speeds[name] += [one.tokens_per_second] * (repeat > 0)
                shares = one.statistics.details.get("rounds by drafter", shares)
        yield {"speed": {name: median(found) for name, found in speeds.items()}, "auto": shares}

    def line(self, record: Record) -> str:
        """Return a cell as a line."""
        over_plain, over_best, best = ratios(record)
        place = f"{size(record['context'])} text {record['text']} T={record['temperature']:g}"
        return f"{place}: {over_plain:.2f} plain, {over_best:.2f} {best} ({record['auto']})"

    def table(self, records: list[Record]) -> str:
        """Return the table; draw it too where that is asked."""
        if self.options.draw:
            draw(records, self.options.draw)
        return table(records)


def ratios(cell: Record) -> tuple[float, float, str]:
    """Return auto over plain, auto over the best other method, and which that is."""
    speed = dict(cell["speed"])
    own = speed.pop("auto")
    best = max(speed, key=lambda name: speed[name])
    return own / speed["plain"], own / speed[best], best


def table(cells: Sequence[Record]) -> str:
    """Return a line per context and temperature, then what the bars ask for."""
    if not cells:
        return "no cells"
    names = list(dict.fromkeys(name for cell in cells for name in cell["speed"]))
    others = [name for name in names if name != "plain"]
    header = [("context", ">"), ("T", ">"), ("plain, tokens/s", ">"), *((n, ">") for n in others)]
    lines = []
    for context, heat in dict.fromkeys((c["context"], c["temperature"]) for c in cells):
        alike = [c for c in cells if (c["context"], c["temperature"]) == (context, heat)]
        plain = _mean(alike, "plain")
        gains = (f"{_mean(alike, name) / plain:.2f}" for name in others)
        lines.append([size(context), f"{heat:g}", f"{plain:.0f}", *gains])
    over_plain, over_best, _ = zip(*map(ratios, cells), strict=True)
    return (
        aligned(header, lines)
        + f"\n\nauto over plain: worst of {len(cells)} cells {min(over_plain):.2f}, mean "
        + f"{geometric_mean(over_plain):.2f}; over the best other method of the cell: mean "
        + f"{geometric_mean(over_best):.2f}, worst {min(over_best):.2f}"
    )


def _mean(cells: Sequence[Record], name: str) -> float:
    return geometric_mean([cell["speed"][name] for cell in cells])


def draw(cells: Sequence[Record], path: Path) -> None:
    """Draw tokens per second against the context, a line per method."""

    def fill(heat: float, axes: Any) -> None:
        here = [cell for cell in cells if cell["temperature"] == heat]
        contexts = sorted({cell["context"] for cell in here})
        for name in here[0]["speed"]:
            means = [_mean([c for c in here if c["context"] == n], name) for n in contexts]
            axes.plot(contexts, means, marker="o", markersize=3, label=name, **STYLES.get(name, {}))
        pictures.logarithmic(axes, contexts)
        axes.set(xlabel="tokens of prompt", ylabel="new tokens per second")

    heats = sorted({cell["temperature"] for cell in cells})
    pictures.draw([(f"temperature {heat:g}", partial(fill, heat)) for heat in heats], path)


main = partial(study.run, Auto)
if __name__ == "__main__":
    sys.exit(main())
