"""Measure how fast prompts are read, by our attention and by each FlashAttention that is installed.

    python bench/studies/prefill.py --shape llama-3.1-8b --device cuda --json prefill.jsonl

A prompt is read in chunks, as `generate` reads it: torch's products, our norms and rope, attention
by whoever is named; and through the model's own modules (*modules*). All take turns. Weights are
random: what a prompt takes does not depend on them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments
from common.clock import Stopwatch, paired_ratio, timing
from common.records import Record
from common.tables import or_dash, size

from specattn import flash_attention
from specattn.decoding import Target
from specattn.decoding.engine.loop import CHUNK_SIZE
from specattn.decoding.passes.prompts import Prompts
from specattn.planning import MODELS
from studies import study
from studies.of_shape import OfShape

OURS, MODULES = "ours", "modules"


class Prefill(OfShape):
    """A cell is a context, with a row for each way to read a prompt of it."""

    defaults = {"context": [512, 4096, 16384]}
    cells, kind, resumes = ("context",), "prefill", True
    header = (
        ("context", ">"), ("attention", "<"), ("ms", ">"), ("±", ">"), ("tokens/s", ">"),
        ("TFLOP/s", ">"), ("over ours", ">"),
    )  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: arguments.Parser) -> None:
        """Add the shape, and where it runs."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("--budget", type=float, default=5.0, help="seconds for each context")

    def __init__(self, options: argparse.Namespace):
        super().__init__(options)
        self.libraries: dict[str, ModuleType] = {}
        if self.device.type == "cuda":
            found = {name: flash_attention.loaded(name) for name in flash_attention.MODULES}
            self.libraries = {name: x for name, x in found.items() if isinstance(x, ModuleType)}

    @torch.inference_mode()
    def measure(self, place: Record) -> Iterator[Record]:
        """Yield the ways to read a prompt, all timed in turn."""
        context = place["context"]
        tokens = torch.randint(self.model.config.vocab_size, (context,), device=self.device)
        # One after the other they share no cache, so each has the memory that it would have.
        ways: dict[str, tuple[Target, Prompts | None]] = {}
        replayed = Target(self.model, 1, context)
        ways[OURS] = replayed, None
        for name, library in self.libraries.items():
            ways[name] = replayed, Prompts(name, library)
        ways[MODULES] = Target(self.model, 1, context, compile="off"), None
        calls = {name: partial(read, *way, tokens) for name, way in ways.items()}
        for call in calls.values():
            call()  # which compiles, and compares what is another's
        watch = Stopwatch(self.device, flush=False)
        found = watch.alternate(calls, budget=self.options.budget)
        operations = self.operations(context)
        for name, (target, prompts) in ways.items():
            time = timing(found[name])
            refused = prompts is not None and not all(prompts.agree.values())
            yield {
                "attention": name, "how": target.runner.how, "refused": refused, "time": time,
                "operations": operations, "over_ours": paired_ratio(found[name], found[OURS]),
            }  # fmt: skip

    def operations(self, context: int) -> int:
        """Return what reading a prompt multiplies and adds; of its scores what is seen."""
        shape, layers = MODELS[self.options.shape], self.model.config.num_hidden_layers
        head = shape.head_weights
        weights = (shape.weights_per_token - head) * layers // shape.layers
        seen = context * (context + 1) // 2
        return 2 * weights * context + 4 * layers * shape.q_heads * shape.head_dim * seen

    def row(self, record: Record) -> tuple[str, ...]:
        """Return a way to read a prompt."""
        time, context = record["time"], record["context"]
        name = record["attention"] + ", refused: ours" * record["refused"]
        return (
            size(context), name, f"{1e3 * time['median']:.1f}", f"{time['spread']:.0%}",
            f"{context / time['median']:.0f}",
            f"{1e-12 * record['operations'] / time['median']:.3g}", or_dash(record["over_ours"]),
        )  # fmt: skip


def read(target: Target, prompts: Prompts | None, tokens: torch.Tensor) -> None:
    """Read a prompt into an empty cache, its attention by `prompts`, or by our kernels."""
    target.cache.clear()
    with _by(target, prompts):
        target.prefill([tokens], CHUNK_SIZE)


@contextmanager
def _by(target: Target, prompts: Prompts | None) -> Iterator[None]:
    target._prompts = lambda: prompts  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target._prompts


if __name__ == "__main__":
    sys.exit(study.run(Prefill))
