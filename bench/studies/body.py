"""Measure what passes of a model's shape take, by their rows, over what their bytes take.

    python bench/studies/body.py --shape llama-3.1-8b --device cuda --json body.jsonl

Weights are random: what a pass takes does not depend on them. A cell is a context and a batch; its
rows are passes of so many rows of each request, replayed as decoding replays them, and through the
model's modules (`--compile off`). Each call is waited for; *queued* are 20 calls, the last of which
is waited for. `launches` counts kernels of a pass on a GPU, `graph_bytes` is what the cell's graphs
hold there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
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
from specattn.blocks import graph_bytes
from specattn.decoding import Target
from specattn.decoding.engine.target import KV_DTYPES
from specattn.decoding.model.quantised import QUANTIZE
from studies import study
from studies.of_shape import OfShape

QUEUED = 20  # calls between two waits: what the host does for one then hides behind another


class Body(OfShape):
    """A cell is a context, a batch, whether passes are replayed and what is stored in fewer bits.

    It has a row per rows.
    """

    defaults = {"context": [512, 32768]}
    cells = "quantize", "kv_dtype", "context", "batch", "compile"
    kind, resumes = "pass", True
    header = (
        ("weights", "<"), ("cache", "<"), ("context", ">"), ("B", ">"), ("rows", ">"),
        ("passes are", "<"), ("ms", ">"), ("±", ">"), ("GB/s", ">"), ("over one row", ">"),
        ("queued, ms", ">"), ("queued, over one row", ">"), ("launches", ">"),
        ("graphs, MB", ">"),
    )  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: arguments.Parser) -> None:
        """Add the shape, where it runs, and the passes."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("--rows", type=arguments.numbers, default=[1, 8, 16, 64, 200], metavar="N[,N]")
        add("--batch", type=arguments.numbers, default=[1], metavar="B[,B]")
        add("--compile", type=lambda text: text.split(","), default=["auto"], metavar="auto,off")
        add("--quantize", type=few_bits(QUANTIZE), default=[None], metavar="off,int8,..")
        add("--kv-dtype", type=few_bits(KV_DTYPES), default=[None], metavar="off,int8,..")
        add("--budget", type=float, default=2.0, help="seconds for each cell's passes")

    @torch.inference_mode()
    def measure(self, place: Record) -> Iterator[Record]:
        """Yield the passes of a cell, all timed in turn."""
        context, batch, most = place["context"], place["batch"], max(self.options.rows)
        stored = {name: place[name] for name in ("compile", "quantize", "kv_dtype")}
        target = Target(self.model, batch, context + most, **stored)
        if place["kv_dtype"] is None:  # codes are what they are: any take as long
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
        watch, budget = Stopwatch(device, flush=False), self.options.budget
        waited = watch.alternate(calls, budget=budget)
        series = {rows: partial(repeated, call) for rows, call in calls.items()}
        queued = {
            rows: [seconds / QUEUED for seconds in samples]
            for rows, samples in watch.alternate(series, budget=budget, least=3).items()
        }
        of_one, of_one_queued = (timing(x[min(calls)])["median"] for x in (waited, queued))
        weights, token = passes.weight_bytes(target.model), passes.token_bytes(target)
        held = graph_bytes(device) if device.type == "cuda" else None
        for rows, call in calls.items():
            time, behind = timing(waited[rows]), timing(queued[rows])
            moves = weights + batch * token * (context + rows)
            yield {
                "rows": rows, "how": target.runner.how, "time": time, "queued": behind,
                "bytes": moves, "bandwidth": moves / time["median"],
                "over_one_row": time["median"] / of_one,
                "queued_over_one_row": behind["median"] / of_one_queued,
                "launches": launches(call) if device.type == "cuda" else None,
                "graph_bytes": held,
            }  # fmt: skip

    def row(self, record: Record) -> tuple[str, ...]:
        """Return a pass."""
        time, launched = record["time"], record["launches"]
        queued = record.get("queued", {}).get("median")  # files of before have none
        return (
            record["quantize"] or "-", record["kv_dtype"] or "-", size(record["context"]),
            str(record["batch"]), str(record["rows"]), record["how"],
            f"{1e3 * time['median']:.2f}", f"{time['spread']:.0%}",
            f"{record['bandwidth'] / 1e9:.0f}", or_dash(record["over_one_row"]),
            or_dash(queued, scale=1e3), or_dash(record.get("queued_over_one_row")),
            "-" if launched is None else str(launched),
            or_dash(record.get("graph_bytes"), "{:.0f}", 1e-6),
        )  # fmt: skip


def few_bits(kinds: Iterable[str]) -> Callable[[str], list[str | None]]:
    """Return what reads a list of such names, "off" for none."""

    def read(text: str) -> list[str | None]:
        names = text.split(",")
        if unknown := set(names) - {"off", *kinds}:
            known = ", ".join(["off", *kinds])
            raise argparse.ArgumentTypeError(f"expected some of {known}, got {sorted(unknown)}")
        return [None if name == "off" else name for name in names]

    return read


def repeated(call: passes.Call) -> None:
    """Call it as often as is queued before a wait."""
    for _ in range(QUEUED):
        call()


def launches(call: passes.Call) -> int:
    """Return how many kernels a call runs on a GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == device for event in profile.events())


if __name__ == "__main__":
    sys.exit(study.run(Body))
