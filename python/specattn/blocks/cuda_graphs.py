"""CUDA graphs: captured beside other threads, and torch left as it was where that fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import torch

from specattn.blocks.results import note_pool


class Graph(Protocol):
    """Something that keeps the work that a function gives to a device."""

    def capture(self, run: Callable[[], None]) -> None:
        """Keep what `run` does; it may be called several times, with or without being done."""

    def replay(self) -> None:
        """Do it, on what its tensors hold now."""


class CudaGraph:
    """A CUDA graph, in a pool of graphs never replayed while results of another are needed."""

    def __init__(self, pool: Any):
        self.graph, self.pool = torch.cuda.CUDAGraph(), pool
        note_pool(self, pool)

    def capture(self, run: Callable[[], None]) -> None:
        """Keep what `run` does on the current GPU, after it was done once.

        That compiles kernels and loads them. Where it fails nothing is left of it, and the memory
        for launches, too, is what OutOfMemoryError is about. Other threads wait to capture, and do
        everything else on the GPU meanwhile but wait for all of it.
        """
        stream, own = torch.cuda.current_stream(), _capturing(torch.cuda.current_device())
        # Done in the same stream: cuBLAS keeps memory of its own for every other one.
        with _ALONE, torch.cuda.stream(own):
            own.wait_stream(stream)
            try:
                run()
                with _captured_by(self.graph, self.pool, own):
                    run()
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError) or not _is_full(error):
                    raise
                raise torch.OutOfMemoryError(str(error)) from error
            finally:
                stream.wait_stream(own)

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


_ALONE = threading.RLock()  # of who captures


@contextmanager
def _captured_by(graph: Any, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what is done inside; what other threads do makes no difference."""
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    # Where torch before 2.11 makes its generator's tensors, which no other capture could write.
    with torch.inference_mode(False):
        capture.__enter__()
    ran, collects = False, gc.isenabled()
    gc.disable()  # it may free another graph, which CUDA forbids meanwhile
    try:
        yield
        ran = True
    finally:
        if collects:
            gc.enable()
        try:
            capture.__exit__(None, None, None)
        except RuntimeError:
            _settle(pool, stream)
            if ran:  # or else what failed first says why
                raise


def _settle(pool: Any, stream: torch.cuda.Stream) -> None:
    """Undo what torch before 2.12 leaves behind of a capture that cannot be ended.

    Its allocator waits for the end for ever, and it makes no random numbers until another capture
    has ended.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
    nothing = torch.cuda.CUDAGraph()
    mode: Any = {"stream": stream, "capture_error_mode": "thread_local"}
    with suppress(RuntimeError), torch.cuda.graph(nothing, **mode):
        torch.zeros(1, device="cuda", dtype=torch.float32)


def _is_full(error: RuntimeError) -> bool:
    """Whether a GPU has no memory left for what the driver or Triton loads there."""
    return "out of memory" in str(error).partition("\n")[0]


@cache
def _capturing(index: int) -> torch.cuda.Stream:
    """Return the stream that all graphs of a GPU are captured in, so that they share memory.

    torch's own lies on the GPU that was captured on first: on another it would see nothing.
    """
    return torch.cuda.Stream(index)


def cuda_graphs() -> Callable[[], Graph]:
    """Return what makes new graphs that share their memory."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
