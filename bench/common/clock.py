"""One clock for every device: cold caches, candidates measured in turn, all samples kept.

Rivals are timed alternately, round by round, so that a machine that slows down slows all of them;
their ratio is taken within each round.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch

import specattn

from .machine import last_level_cache
from .records import Record


class Stopwatch:
    """Time calls on one device, each from a cold last-level cache.

    Without `flush` whoever calls sees to it that what a call reads is as cold as it should be.
    `rest` are seconds before each call.
    """

    def __init__(self, device: torch.device, *, flush: bool = True, rest: float = 0.0) -> None:
        self.device, self._rest, self._flush = device, rest, None
        if flush:
            # Read, never written, to flush: dirty lines would be written back in the timed call.
            # Ones, not zeros: a CPU maps untouched zeros to one page, which evicts nothing.
            other = torch.ones(2 * last_level_cache(device) // 4, device=device)
            self._flush = plain_read(other) or other.sum

    def prepare(self, call: Callable) -> Callable:
        """Return ``call`` warmed up; on CUDA as the replay of a graph, so launch gaps do not count.

        Raises RuntimeError when a graph cannot capture it.
        """
        if self.device.type == "cuda":
            return _captured(call)
        call()
        return call

    def alternate(
        self, calls: dict[str, Callable], *, budget: float, least: int = 5, most: int = 100
    ) -> dict[str, list[float]]:
        """Return seconds per call: ``least`` to ``most`` rounds of all calls, within ``budget``."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        order, end = list(calls), time.perf_counter() + budget
        for done in range(most):
            if done >= least and time.perf_counter() > end:
                break
            for name in order:
                times[name].append(self._sample(calls[name]))
            order.append(order.pop(0))
        return times

    def _sample(self, call: Callable) -> float:
        if self._flush is not None:
            self._flush()
        if self._rest:
            time.sleep(self._rest)
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def plain_read(memory: torch.Tensor) -> Callable | None:
    """Return a call that reads a CPU tensor once, by all threads; None without the C++ kernels."""
    if memory.is_cuda or specattn.backends()["cpu"] != "available":
        return None
    from specattn import _cpu  # type: ignore[attr-defined]

    return lambda: _cpu.read(memory.data_ptr(), memory.nbytes, torch.get_num_threads())


def _captured(call: Callable) -> Callable:
    """Return the replay of a CUDA graph of ``call``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        # A call that launches in a stream of its own leaves nothing to replay.
        warnings.filterwarnings("error", "The CUDA Graph is empty", UserWarning)
        with torch.cuda.graph(graph):
            call()
    graph.replay()
    torch.cuda.synchronize()

    def replay(reads: Callable = call) -> None:  # whose tensors no graph keeps
        graph.replay()

    return replay


def timing(samples: Sequence[float]) -> Record:
    """Return a median with its spread, ready for JSON."""
    median = statistics.median(samples)
    return {"median": median, "spread": spread(samples), "samples": len(samples)}


def spread(samples: Sequence[float]) -> float:
    """Return the distance between the quartiles over the median; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return how many times longer ``theirs`` took: the median over rounds of their ratio."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
