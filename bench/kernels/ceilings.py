"""Ceilings of this machine, to which rows are held: bandwidths, matrix rates, the time of a call.

The read ceiling is a plain read by the C++ kernels on a CPU. Where they are not built, and on a
GPU, it is the best of several torch calls, by name: none of them is a true ceiling everywhere
(``sum`` stays well under it on some machines).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

import torch
from common.clock import Stopwatch, plain_read
from common.machine import last_level_cache

from specattn.ops.cost import Cost

from .cases import DTYPES

_ROW = 4096 * 4  # bytes of one row of the matrix that the matrix-vector product reads
# Products [m, k] x [k, n] of which the fastest shows the rate.
_PRODUCTS = {"cpu": ((2048, 512, 2048), (1024, 4096, 1024)), "cuda": ((8192, 8192, 8192),)}
_LAYER = (14336, 4096)  # one product of the MLP of an 8B model
_FEW_ROWS = (1, 4, 16, 64)
_Name = TypeVar("_Name")


class Probe(NamedTuple):
    """The call that reached the highest bandwidth, to be timed again beside every row.

    Memory shared with other machines on a host gives more at one moment than at the next.
    """

    call: Callable[[], object]
    bytes: int


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations per second; the method that read fastest stands beside its figure."""

    read: float
    read_method: str
    copy: float
    matrix: dict[str, float]  # by dtype
    linear: dict[str, dict[int, float]]  # bytes of weights per second, by dtype and rows
    call: float  # seconds of the smallest torch operation, from cold
    probe: Probe

    @property
    def bandwidth(self) -> float:
        """The larger of the two; a copy counts bytes read plus bytes written."""
        return max(self.read, self.copy)

    def bounds(self, cost: Cost, dtype: str, bandwidth: float) -> dict[str, float]:
        """Return the seconds below which each ceiling lets nobody fall."""
        matrix = cost.operations / self.matrix[dtype]
        return {"memory": cost.bytes / bandwidth, "matrix": matrix, "call": self.call}

    def as_json(self) -> dict:
        """Return the figures under the names that the JSON schema uses."""
        figures = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "probe"}
        return {**figures, "bandwidth": self.bandwidth}


def measure(device: torch.device, dtypes: Sequence[str], *, seconds: float) -> Ceilings:
    """Time reads and a copy of a buffer far larger than the last cache, products, and a call.

    Products are timed in these types alone: some processors take minutes for one in float16.
    """
    size = 4 * last_level_cache(device) // _ROW * _ROW
    source = torch.ones(size // 4, device=device)
    target, reads = torch.ones_like(source), _reads(source)
    warm = Stopwatch(device, flush=False)  # each buffer is larger than what a cache keeps
    best, ready = _best(warm, {**reads, "copy": lambda: target.copy_(source)}, seconds)
    method = min(reads, key=best.__getitem__)
    read, copy = size / best[method], 2 * size / best["copy"]
    probe = Probe(ready[method], size) if read >= copy else Probe(ready["copy"], 2 * size)
    matrix = {name: _matrix(warm, DTYPES[name], seconds / 3) for name in dtypes}
    cold = Stopwatch(device)  # as rows start; so does the smallest call that bounds them
    call = _best(cold, {"call": torch.ones(1, device=device).zero_}, seconds / 3)[0]["call"]
    linear = {name: _linear(cold, DTYPES[name], seconds / 3) for name in dtypes}
    return Ceilings(read, method, copy, matrix, linear, call, probe)


def _matrix(stopwatch: Stopwatch, dtype: torch.dtype, seconds: float) -> float:
    """Return the operations per second of the fastest product."""
    calls, device = {}, stopwatch.device
    for shape in _PRODUCTS[device.type]:
        m, k, n = shape
        a, b = (torch.randn(size, device=device).to(dtype) for size in ((m, k), (k, n)))
        calls[shape] = lambda a=a, b=b: torch.mm(a, b)
    best, _ = _best(stopwatch, calls, seconds)
    return max(2 * math.prod(shape) / time for shape, time in best.items())


def _linear(stopwatch: Stopwatch, dtype: torch.dtype, seconds: float) -> dict[int, float]:
    """Return how fast products of a few rows read the weights of a large layer, from cold."""
    device = stopwatch.device
    weight = torch.randn(_LAYER, device=device).to(dtype)
    rows = {count: torch.randn(count, _LAYER[1], device=device).to(dtype) for count in _FEW_ROWS}
    calls = {count: lambda x=x: torch.nn.functional.linear(x, weight) for count, x in rows.items()}
    best, _ = _best(stopwatch, calls, seconds)
    return {count: weight.nbytes / time for count, time in best.items()}


def _best(
    stopwatch: Stopwatch, calls: dict[_Name, Callable], seconds: float
) -> tuple[dict[_Name, float], dict[_Name, Callable]]:
    """Return the shortest time of each call, and the calls as they were timed."""
    ready = {name: stopwatch.prepare(call) for name, call in calls.items()}
    times = stopwatch.alternate(ready, budget=seconds)
    return {name: min(samples) for name, samples in times.items()}, ready


def _reads(source: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return ways to read every byte once and write next to nothing."""
    if plain := plain_read(source):
        return {"plain C++ read": plain}
    words, matrix = source.view(torch.int64), source.view(-1, _ROW // 4)
    vector = torch.randn(_ROW // 4, device=source.device)
    return {
        "sum of float32": source.sum,
        "sum of int64": words.sum,
        "max of int64": words.amax,
        "norm": lambda: torch.linalg.vector_norm(source),
        "matrix times vector": lambda: torch.mv(matrix, vector),
    }
