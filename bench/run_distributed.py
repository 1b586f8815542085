"""Shapes of ranks side by side: seconds, processor seconds, bytes and memory of passes.

    python bench/run_distributed.py --context 31000 --shapes 1x2 2x1
    python bench/run_distributed.py --context 12000 --shapes 1x1 2x1 --prefill
    python bench/run_distributed.py --context 1000000 --shapes 4x1 --json million.jsonl

A shape is RANKSxTHREADS, whose ranks share the cache; with ``t`` behind, as in ``2x1t``, they hold
parts of the model. Unless ``--prefill`` runs one, the cache is filled with random keys and values.
All shapes are alive at once and take turns, pass by pass, so what else runs meets all of them.
Processor seconds say what a rank computes even where other programs take its core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from common.arguments import Parser, number
from common.machine import describe
from common.records import RecordFile

from specattn.machine_load import Others

TINY = Path(__file__).parents[1] / "examples" / "tiny"
BUDGET = 4096  # of the sparse draft, tokens
PASSES = ("plain", "verify", "select", "draft")


class Shape(NamedTuple):
    """How many ranks there are, of how many threads, and whether they divide the model."""

    ranks: int
    threads: int
    divides_model: bool

    def __str__(self) -> str:
        return f"{self.ranks}x{self.threads}" + "t" * self.divides_model


def shape(text: str) -> Shape:
    """Return the shape that an argument names."""
    if (found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(t?)", text)) is None:
        raise argparse.ArgumentTypeError(f"expected RANKSxTHREADS or RANKSxTHREADSt, got {text!r}")
    return Shape(int(found[1]), int(found[2]), bool(found[3]))


class Ranks:
    """The processes of one shape, which do what they are told together."""

    def __init__(self, shape: Shape, given: argparse.Namespace):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(shape.ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, shape, rank, port, given)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def __call__(self, what: str) -> list[dict[str, Any]]:
        """Return what every rank measured."""
        for pipe in self.pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def main(argv: list[str] | None = None) -> int:
    """Run the same passes in every shape, in turn; return 0, or leave with 2 for bad arguments."""
    parser = Parser(prog="run_distributed.py", description=(__doc__ or "").splitlines()[0])
    shapes = [Shape(1, 2, False), Shape(2, 1, False)]
    add = parser.add_argument
    add("--model", type=Path, default=TINY)
    add("--context", type=number, default=31_000)
    add("--shapes", type=shape, nargs="+", default=shapes, help="RANKSxTHREADS, t: model in parts")
    add("--prefill", action="store_true", help="of a random text, timed")
    add("--rows", type=number, default=7, help="of a verification")
    add("--passes", type=number, default=20)
    add("--kinds", nargs="+", choices=PASSES, default=list(PASSES))
    add("--json", type=Path, help="write records there, one a line")
    given = parser.parse_args(argv)
    if not given.model.is_dir():
        parser.error(f"--model: {given.model} is no folder")
    head = {"kind": "run", "context": given.context, "rows": given.rows}
    with parser.refusing("--json: "):
        records = RecordFile(given.json, [{**head, **describe(torch.device("cpu"))}])
    started = {str(one): Ranks(one, given) for one in given.shapes}
    try:
        for name, ranks in started.items():
            _report(records, name, "fill", [ranks("fill")], None)
        for kind in given.kinds:
            others = Others([p.pid for ranks in started.values() for p in ranks.processes])
            found: dict[str, list] = {name: [] for name in started}
            for turn in range(given.passes + 1):
                for name, ranks in started.items():
                    one = ranks(kind)
                    if turn:  # the first records what the others replay
                        found[name].append(one)
            cores = others.cores()
            for name, measured in found.items():
                _report(records, name, kind, measured, cores)
    finally:
        for ranks in started.values():
            ranks.close()
    return 0


def _report(
    records: RecordFile, name: str, kind: str, measured: list[list[dict]], others: float | None
) -> None:
    """Print and keep the medians over passes: of the slowest rank, and processor seconds of all."""
    walls = [max(rank["wall"] for rank in one) for one in measured]
    ranks = list(zip(*measured, strict=True))
    row = {
        "kind": "row",
        "shape": name,
        "pass": kind,
        "wall_s": median(walls),
        "least_wall_s": min(walls),
        "processor_s": [median(one["processor"] for one in rank) for rank in ranks],
        "waits_s": [median(one["waits"] for one in rank) for rank in ranks],
        "sent_bytes": [rank[-1]["sent"] for rank in ranks],
        "cache_bytes": [rank[-1]["cache"] for rank in ranks],
        "peak_rss_bytes": [rank[-1]["peak"] for rank in ranks],
        "others": others,
    }
    records.add(row)
    times = zip(row["processor_s"], row["waits_s"], strict=True)
    each = "  ".join(f"{processor * 1e3:.1f} ({waits * 1e3:.1f})" for processor, waits in times)
    print(
        f"{name:>6} {kind:7} {row['wall_s'] * 1e3:9.1f} ms, at least {min(walls) * 1e3:9.1f}; "
        f"processor (exchanges) of each rank {each}; sent {row['sent_bytes'][0] / 1e6:.3f} MB, "
        f"cache {row['cache_bytes'][0] / 1e6:.0f} MB, peak {row['peak_rss_bytes'][0] / 1e6:.0f} MB"
        + ("" if others is None else f"; others {others:.1f} cores"),
        flush=True,
    )


def _serve(pipe: Any, shape: Shape, rank: int, port: int, given: argparse.Namespace) -> None:
    """Do as a pipe says, and answer what it took."""
    import torch.distributed as dist

    from specattn.peak_memory import peak_bytes

    torch.set_num_threads(shape.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    if shape.ranks > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=shape.ranks)
    work = _Work(shape, given)
    with suppress(EOFError):
        while True:
            what = pipe.recv()
            work.ranks_waited = 0.0
            before = work.sent()
            wall, processor = time.perf_counter(), time.process_time()
            getattr(work, what)()
            pipe.send(
                {
                    "wall": time.perf_counter() - wall,
                    "processor": time.process_time() - processor,
                    "waits": work.ranks_waited,
                    "sent": work.sent() - before,
                    "cache": work.target.cache.nbytes,
                    "peak": peak_bytes(torch.device("cpu")) or 0,
                }
            )


class _Work:
    """What one rank does: a target over a long cache, and passes of it."""

    def __init__(self, shape: Shape, given: argparse.Namespace):
        from specattn.decoding.engine.target import Target
        from specattn.decoding.model.checkpoint import load_causal_model
        from specattn.decoding.model.model import Model
        from specattn.decoding.passes.attention import CaptureSpec
        from specattn.decoding.ranks.lockstep import Lockstep
        from specattn.distributed import ContextParallel
        from specattn.tree import Tree

        parts = shape.ranks if shape.divides_model else 1
        model = load_causal_model(given.model, torch.float32, tensor_parallel=parts)
        context = ContextParallel() if shape.ranks > 1 and not shape.divides_model else None
        self.given, self.context = given, given.context
        self.lockstep = Lockstep.of(model, context)
        self.every = [x for x in (context, Model.ranks_of(model)) if x is not None]
        self.target = Target(model, 1, given.context + 4 * given.rows, lockstep=self.lockstep)
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(model.config.vocab_size, (given.context,), generator=generator)
        self.chain, self.root = Tree.chain(given.rows - 1), Tree.chain(0)
        self.capture = CaptureSpec(rows=(0, -1))
        self.scores: Any = None
        self.selection: Any = None
        self.ranks_waited = 0.0
        for one in self.every:
            one.run = self._timed(one.run)  # type: ignore[method-assign]

    def _timed(self, run: Callable) -> Callable:
        def timed(collective: Callable) -> None:
            begin = time.perf_counter()
            run(collective)
            self.ranks_waited += time.perf_counter() - begin

        return timed

    def sent(self) -> int:
        """Return the bytes that were sent so far."""
        return sum(sum(one.sent_bytes.values()) for one in self.every)

    def fill(self) -> None:
        """Prefill the text, or let random keys and values stand for one."""
        if self.given.prefill:
            self.target.prefill([self.text], 2048)
            return
        for layer in range(len(self.target.windows)):
            for half in self.target.cache.layer(layer):
                half.normal_()
        self.target.cache.seqlens = torch.tensor([self.context], dtype=torch.int32)

    def plain(self) -> None:
        """Run a pass of one row."""
        self.target.verify(self.root, self.text[None, :1])

    def verify(self) -> None:
        """Verify a chain and collect scores."""
        tokens = self.text[None, : self.given.rows]
        self.scores = self.target.verify(self.chain, tokens, capture=self.capture).scores

    def select(self) -> None:
        """Select the best tokens of every layer by the last scores."""
        from specattn.decoding.passes.attention import Selection

        cache, layers = self.target.cache, len(self.target.full_layers)
        found = cache.select_topk(
            self.scores.flatten(0, 1), cache.seqlens.repeat(layers), budget=BUDGET
        )
        self.selection = Selection(found[0].unflatten(0, (layers, 1)), found[1][:1])

    def draft(self) -> None:
        """Draft one token on the selection."""
        self.target.draft(self.text[None, :1], 0, self.selection)


if __name__ == "__main__":
    sys.exit(main())
