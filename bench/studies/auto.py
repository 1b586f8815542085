"""Compare `auto` with every method: cells of text, context and temperature, all methods in turn.

    python bench/studies/auto.py --context 1k,4k,16k --texts 5 --json cells.jsonl

A cell is one text; its figures are medians of the repeats, after one run to warm up. Files of the
standard library that the embedded target was not trained on are continued. docs/tools has the table
of their means, and the picture.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.records import Record
from common.tables import size
from decoding.runs import run

from studies import study

METHODS = ("plain", "auto", "suffix", "prompt_lookup", "vegas", "longspec", "poss", "medusa")


class Auto(study.Study):
    """A cell has tokens per second of every method, and what `auto` did."""

    defaults = {"method": None, "context": [1024, 4096, 16384], "temperature": [0.0, 1.0]} | {
        "texts": 5, "new_tokens": 192, "repeats": 3, "threads": 2
    }  # fmt: skip
    cells, kind = ("context", "text", "temperature"), "cell"
    header = (
        ("context", ">"), ("text", ">"), ("T", ">"), ("x plain", ">"), ("x best", ">"),
        ("best other", "<"), ("rounds of auto", "<"),
    )  # fmt: skip

    def __init__(self, options: Any):
        options.method = options.method or METHODS
        super().__init__(options)
        if not {"plain", "auto"} <= set(self.methods):
            raise ValueError("--method: plain and auto must be among them")

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

    def row(self, record: Record) -> tuple[str, ...]:
        """Return how `auto` stands to plain decoding, and to the best other method."""
        speed = dict(record["speed"])
        own = speed.pop("auto")
        best = max(speed, key=lambda name: speed[name])
        place = size(record["context"]), str(record["text"]), f"{record['temperature']:g}"
        over = f"{own / speed['plain']:.2f}", f"{own / speed[best]:.2f}"
        return *place, *over, best, record["auto"]


main = partial(study.run, Auto)
if __name__ == "__main__":
    sys.exit(main())
