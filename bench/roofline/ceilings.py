"""The memory bandwidth that this machine shows to torch: the ceiling every row is held against.

No single torch call is a read ceiling on a CPU (``sum`` stays well under it on some machines), so
several are timed and the best one counts, by name. Kernels written for a machine may still beat
it; a share above 100% then says that torch cannot saturate the memory, not that bytes vanished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .machine import last_level_cache
from .timing import Stopwatch

_ROW = 4096 * 4  # bytes of one row of the matrix that the matrix-vector product reads


@dataclass(frozen=True)
class Probe:
    """The call that reached the highest bandwidth, to be timed again beside every row.

    Memory shared with other machines on a host gives more at one moment than at the next.
    """

    call: Callable[[], torch.Tensor]
    bytes: int


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second; the method that read fastest stands beside its figure."""

    read: float
    read_method: str
    copy: float
    probe: Probe

    @property
    def bandwidth(self) -> float:
        """The larger of the two; a copy counts bytes read plus bytes written."""
        return max(self.read, self.copy)

    def as_json(self) -> dict:
        """Return the figures under the names that the JSON schema uses."""
        return {
            "read": self.read,
            "read_method": self.read_method,
            "copy": self.copy,
            "bandwidth": self.bandwidth,
        }


def measure(device: torch.device, *, seconds: float) -> Ceilings:
    """Time reads and a copy of a buffer far larger than the last cache, best of several."""
    size = 8 * last_level_cache(device) // _ROW * _ROW
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    reads = _reads(source)
    calls = {**reads, "copy": lambda: target.copy_(source)}
    stopwatch = Stopwatch(device)
    ready = {name: stopwatch.prepare(call) for name, call in calls.items()}
    times = stopwatch.alternate(ready, budget=seconds)
    best = {name: min(samples) for name, samples in times.items()}
    method = min(reads, key=best.__getitem__)
    read, copy = size / best[method], 2 * size / best["copy"]
    probe = Probe(ready[method], size) if read >= copy else Probe(ready["copy"], 2 * size)
    return Ceilings(read, method, copy, probe)


def _reads(source: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Ways to read every byte once and write next to nothing."""
    words = source.view(torch.int64)
    matrix = source.view(-1, _ROW // 4)
    vector = torch.randn(_ROW // 4, device=source.device)
    return {
        "sum of float32": source.sum,
        "sum of int64": words.sum,
        "max of int64": words.amax,
        "norm": lambda: torch.linalg.vector_norm(source),
        "matrix times vector": lambda: torch.mv(matrix, vector),
    }
