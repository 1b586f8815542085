"""Where captured programs leave their largest results: memory that all of one owner share."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch


class Results:
    """Memory for rows of results, of which one program's count at a time.

    A CUDA graph writes where it wrote when it was captured, and there is one for every number of
    rows. So there is room for 1, 2, 4, ... rows, as soon as it is asked for, which all programs of
    up to so many rows write to: whatever sizes come, and in which order, that is at most four times
    what the largest one takes, and at most twice where that is a power of two.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[int, int, torch.dtype, torch.device], torch.Tensor] = {}
        _alive.append(ref(self, _alive.remove))

    def rows(self, count: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory [count, width] of the type and on the device of `like`."""
        most = 1 << (count - 1).bit_length()
        key = most, width, like.dtype, like.device
        if key not in self._rooms:
            self._rooms[key] = like.new_empty(most, width)
        return self._rooms[key][:count]

    def nbytes(self, index: int) -> int:
        """Return the bytes that it takes on the GPU of this index."""
        return sum(room.nbytes for room in list(self._rooms.values()) if room.device.index == index)


_alive: list[ref[Results]] = []
_graphs: dict[ref[Any], Any] = {}  # which pool each has


def note_pool(graph: Any, pool: Any) -> None:
    """Count a pool as what graphs hold, as long as this one lives."""
    _graphs[ref(graph, lambda gone: _graphs.pop(gone, None))] = pool


def graph_bytes(device: torch.device) -> int:
    """Return what this process' CUDA graphs of passes and drafts hold on a GPU; elsewhere 0.

    That is what their pools have, in which they compute, workspaces of their kernels included, and
    the results that they share. What the driver keeps of launches lies outside torch's memory.
    Allocators other than torch's own do not say what their pools have.
    """
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    tells = torch.cuda.get_allocator_backend() == "native"
    # One by one: a look at all of torch's memory takes as long as there are pieces of it.
    pools = sum(
        segment["total_size"]
        for pool in (set(_graphs.copy().values()) if tells else ())
        for segment in torch.cuda.memory_snapshot(pool)
        if segment["device"] == index
    )
    shared = filter(None, [one() for one in list(_alive)])
    return pools + sum(one.nbytes(index) for one in shared)
