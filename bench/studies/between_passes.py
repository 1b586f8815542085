"""Measure what stands between two passes: a round of decoding around passes that return at once.

    python bench/studies/between_passes.py --shape llama-3.1-8b --layers 1 --device cuda --json FILE
    python bench/studies/between_passes.py --shape tiny --dtype float32

Drafting, drawing, the walk along the draft, the commit, stopping rules and records are decoding's
own. Of every number of rows the first pass is run and its result given again, so what is left is
the host's work and, on a GPU, the few kernels that draw: no less than what stands between passes
there, since the host does a part of it while a pass runs. Of a model only its vocabulary matters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments
from common.clock import timing
from common.records import Record
from decoding.runs import run
from decoding.texts import RandomTokens

from specattn.decoding import Target
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.decoding.passes.runner import Verification
from specattn.tree import Tree
from studies import study
from studies.of_shape import OfShape

PROMPT = 64  # tokens, which are read by real passes
PARTS = ("draft", "target", "accept")


class AtOnce(Target):
    """A target that runs the first pass of each number of rows, and returns its result again."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.found: dict[tuple[int, ...], Verification] = {}

    def verify(self, tree: Tree, tokens: torch.Tensor, **options: Any) -> Verification:
        """Return what such a pass returned first."""
        key = tuple(tokens.shape)
        if key not in self.found:
            self.found[key] = super().verify(tree, tokens, **options)
        return self.found[key]


class BetweenPasses(OfShape):
    """A cell is a method, a batch and a temperature, with a row for its rounds."""

    defaults = {"method": ["plain"], "temperature": [0.0, 1.0], "new_tokens": 256, "repeats": 5}
    cells, kind = ("method", "batch", "temperature"), "between"
    header = (
        ("method", "<"), ("B", ">"), ("T", ">"), ("ms a round", ">"), ("±", ">"),
        ("drafting", ">"), ("pass", ">"), ("accepting", ">"), ("processor", ">"),
    )  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: arguments.Parser) -> None:
        """Add the shape, where it runs, and requests."""
        super().add_arguments(parser)
        parser.add_argument("--batch", type=arguments.numbers, default=[1], metavar="B[,B]")

    def measure(self, place: Record) -> Iterator[Record]:
        """Yield the rounds of a cell: medians over runs of their mean.

        `cpu_seconds` are the processor's own for a round, what begins a run included: on a busy
        machine they say more than the time.
        """
        method, new_tokens = self.methods[place["method"]], self.options.new_tokens
        room = PROMPT + new_tokens + method.max_nodes
        target = AtOnce(self.model, place["batch"], room)
        texts = RandomTokens(self.model.config.vocab_size)
        prompts = texts.prompts(0, PROMPT, place["batch"])
        snapshot = PromptSnapshot(target, prompts, readers=[method])
        rounds, busy = [], []
        for seed in range(-1, self.options.repeats):  # the first one warms up
            start = time.process_time()
            outcome = run(snapshot, method, new_tokens, place["temperature"], seed)
            spent, found = time.process_time() - start, outcome.statistics
            if seed >= 0 and found is not None:
                parts = [getattr(found, f"{part}_seconds") / found.passes for part in PARTS]
                rounds.append(parts)
                busy.append(spent / found.passes)
        middle = map(median, zip(*rounds, strict=True))
        parts = dict(zip(PARTS, middle, strict=True))
        whole = timing([sum(one) for one in rounds])
        yield {"time": whole, "parts": parts, "cpu_seconds": median(busy)}

    def row(self, record: Record) -> tuple[str, ...]:
        """Return a cell."""
        time = record["time"]
        return (
            record["method"], str(record["batch"]), f"{record['temperature']:g}",
            f"{1e3 * time['median']:.3f}", f"{time['spread']:.0%}",
            *(f"{1e3 * record['parts'][part]:.3f}" for part in PARTS),
            f"{1e3 * record['cpu_seconds']:.3f}",
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(study.run(BetweenPasses))
