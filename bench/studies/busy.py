"""Measure what a process on the same cores costs short calls of the CPU kernels in a row.

    python bench/studies/busy.py --threads 2 --rounds 40 --core 1

Each series is timed in turn beside a process that does nothing but count, and without it. A series
of attention calls is what a forward pass of a small model makes of them: one row over 512 tokens.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments
from common.clock import paired_ratio
from common.records import Record
from common.tables import aligned

from specattn import _cpu  # type: ignore[attr-defined]
from studies import study

CALLS = 40  # in a series
Q_HEADS, KV_HEADS, HEAD_DIM, KEYS = 32, 4, 64, 512
LEAST_READ = 4096  # bytes: next to no work, so its time is that of waking and waiting
PRODUCT = 512  # rows and columns of the factors of a product by torch


class Busy(study.Study):
    """One cell, with a row per series; what others used has the counting process in it."""

    defaults = {"threads": 2, "rounds": 40}
    cells = ()

    @classmethod
    def add_arguments(cls, parser: arguments.Parser) -> None:
        """Add the core of the other process."""
        parser.add_argument("--core", type=int, help="where the other process runs; or anywhere")

    def measure(self, place: Record) -> Iterator[Record]:
        """Yield microseconds per call, medians over rounds."""
        with counting(self.options.core) as switch:
            found = measure(series(self.options.threads), self.options.rounds, switch)
        for name, times in found.items():
            quiet, busy = (statistics.median(one) / CALLS * 1e6 for one in times)
            yield {"series": name, "quiet": quiet, "busy": busy, "ratio": paired_ratio(*times)}

    def table(self, records: list[Record]) -> str:
        """Return a line per series."""
        header = [("us per call, median", "<"), ("quiet", ">"), ("busy", ">"), ("ratio", ">")]
        rows = [
            (r["series"], f"{r['quiet']:.1f}", f"{r['busy']:.1f}", f"{r['ratio']:.2f}")
            for r in records
        ]
        return aligned(header, rows)


def series(threads: int) -> dict[str, Callable[[], float]]:
    """Return what is timed: each makes `CALLS` calls and returns the seconds in them."""
    memory = torch.ones(2 * LEAST_READ, dtype=torch.uint8)
    factor = torch.randn(PRODUCT, PRODUCT)
    attend, multiply = attention(threads), partial(torch.mm, factor, factor)
    return {
        "least call": lambda: seconds(lambda: _cpu.read(memory.data_ptr(), LEAST_READ, threads)),
        "attention": lambda: seconds(attend),
        "attention after a product": lambda: seconds(attend, multiply),
        "product": lambda: seconds(multiply),
    }


def attention(threads: int) -> Callable[[], None]:
    """Return a call of one row over `KEYS` cached tokens."""
    q, out = torch.randn(2, 1, 1, Q_HEADS, HEAD_DIM)
    k, v = torch.randn(2, 1, KEYS, KV_HEADS, HEAD_DIM)
    lengths = torch.tensor([KEYS - 1], dtype=torch.int32)
    new, lse = torch.randn(1, 1, KV_HEADS, HEAD_DIM), torch.empty(1, 1, Q_HEADS)
    cache, tree = (k, v, lengths), (new, new, None, None, None, None)
    plain = (HEAD_DIM**-0.5, 0.0, None, None, None)
    return lambda: _cpu.hybrid_tree_attention(q, *cache, *tree, *plain, out, lse, threads)


def seconds(call: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Return the time of `CALLS` calls, without that of what comes before each."""
    total = 0.0
    for _ in range(CALLS):
        if before is not None:
            before()
        start = time.perf_counter()
        call()
        total += time.perf_counter() - start
    return total


def measure(
    calls: dict[str, Callable[[], float]], rounds: int, switch: Callable[[bool], None]
) -> dict[str, tuple[list[float], list[float]]]:
    """Return the seconds of every series in each round, quiet and busy."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for busy in (False, True):
            switch(busy)
            for name, call in calls.items():
                found[name][busy].append(call())
    return found


@contextmanager
def counting(core: int | None) -> Iterator[Callable[[bool], None]]:
    """Start a process that counts, and give what lets it run or stops it."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield lambda busy: process.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()


main = partial(study.run, Busy)
if __name__ == "__main__":
    sys.exit(main())
