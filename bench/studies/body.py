"""Measure what passes of a model's shape take, by their rows, over what their bytes take.

    python bench/studies/body.py --shape llama-3.1-8b --device cuda --json body.jsonl

Weights are random: what a pass takes does not depend on them. A cell is a context and a batch; its
rows are passes of so many rows of each request, replayed as decoding replays them, and through the
model's modules (`--compile off`). `launches` counts kernels of a pass on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments
from common.clock import Stopwatch, timing
from common.records import Record
from common.tables import or_dash, size
from decoding import passes

from specattn import Tree
from specattn.decoding import Target
from studies import study
from studies.of_shape import OfShape


class Body(OfShape):
    """A cell is a context, a batch and whether passes are replayed, with a row per rows."""

    defaults = {"context": [512, 32768]}
    cells, kind, resumes = ("context", "batch", "compile"), "pass", True
    header = (
        ("context", ">"), ("B", ">"), ("rows", ">"), ("passes are", "<"), ("ms", ">"), ("±", ">"),
        ("GB/s", ">"), ("over one row", ">"), ("launches", ">"),
    )  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: arguments.Parser) -> None:
        """Add the shape, where it runs, and the passes."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("--rows", type=arguments.numbers, default=[1, 8, 16, 64, 200], metavar="N[,N]")
        add("--batch", type=arguments.numbers, default=[1], metavar="B[,B]")
        add("--compile", type=lambda text: text.split(","), default=["auto"], metavar="auto,off")
        add("--budget", type=float, default=2.0, help="seconds for each cell's passes")

    def __init__(self, options: argparse.Namespace):
        super().__init__(options)
        self.weights = passes.weight_bytes(self.model)

    @torch.inference_mode()
    def measure(self, place: Record) -> Iterator[Record]:
        """Yield the passes of a cell, all timed in turn."""
        context, batch, most = place["context"], place["batch"], max(self.options.rows)
        target = Target(self.model, batch, context + most, compile=place["compile"])
        target.cache.storage.normal_()
        target.cache.seqlens.fill_(context)
        vocabulary, device = self.model.config.vocab_size, self.device
        tokens = torch.randint(vocabulary, (batch, most), device=device)
        calls = {
            rows: partial(target.verify, Tree.chain(rows - 1, device=device), tokens[:, :rows],
                          reuse_buffers=True)
            for rows in self.options.rows
        }  # fmt: skip
        for call in calls.values():
            for _ in range(3):  # captured, and warm
                call()
        # What a pass reads is larger than any cache.
        found = Stopwatch(device, flush=False).alternate(calls, budget=self.options.budget)
        single = timing(found[min(calls)])["median"]
        for rows, call in calls.items():
            time, token = timing(found[rows]), passes.token_bytes(target)
            moves = self.weights + batch * token * (context + rows)
            yield {
                "rows": rows, "how": target.runner.how, "time": time, "bytes": moves,
                "bandwidth": moves / time["median"], "over_one_row": time["median"] / single,
                "launches": launches(call) if device.type == "cuda" else None,
            }  # fmt: skip

    def row(self, record: Record) -> tuple[str, ...]:
        """Return a pass."""
        time = record["time"]
        launched = record["launches"]
        return (
            size(record["context"]), str(record["batch"]), str(record["rows"]), record["how"],
            f"{1e3 * time['median']:.2f}", f"{time['spread']:.0%}",
            f"{record['bandwidth'] / 1e9:.0f}", or_dash(record["over_one_row"]),
            "-" if launched is None else str(launched),
        )  # fmt: skip


def launches(call: passes.Call) -> int:
    """Return how many kernels a call runs on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == device for event in profile.events())


if __name__ == "__main__":
    sys.exit(study.run(Body))
