"""Times of attention over 32k keys on a GPU, ours beside what is installed, for ``gpu-check``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

import specattn
from specattn import flash_attention
from specattn.blocks.cuda_graphs import CudaGraph
from specattn.gpu_checks.cases import using

KEYS, Q_HEADS, KV_HEADS, D = 32768, 32, 8, 128
ROWS = (1, 16)
_CALLS, _WINDOWS = 10, 15


class Time(NamedTuple):
    """One implementation: seconds of a call, or why there are none, and bytes it had to read."""

    rows: int
    name: str
    seconds: float | None
    said: str
    bytes: int


def times(backends: list[str]) -> Iterator[Time]:
    """Yield the times of chains of some rows, one request; whatever fails is told and costs none.

    Each is the median of windows of calls replayed in a graph, or made one by one where they cannot
    be captured.
    """
    k, v = torch.randn(2, 1, KEYS + max(ROWS), KV_HEADS, D, dtype=torch.bfloat16, device="cuda")
    size = 2 * KEYS * KV_HEADS * D * 2
    for rows in ROWS:
        q = torch.randn(1, rows, Q_HEADS, D, dtype=torch.bfloat16, device="cuda")
        for name, call in calls(backends, q, k[:, : KEYS + rows], v[:, : KEYS + rows]):
            try:
                seconds, said = _median(call)
                yield Time(rows, name, seconds, said, size)
            except Exception as error:  # an interface of another version, or no kernel for this GPU
                text = " ".join(str(error).split())[:120]
                yield Time(rows, name, None, f"{type(error).__name__}: {text}", size)


def absent() -> dict[str, str]:
    """Return the other libraries that are not there, and why."""
    found = {
        name: flash_attention.loaded(name) for name in ("flashinfer", *flash_attention.MODULES)
    }
    return {name: why for name, why in found.items() if isinstance(why, str)}


def calls(
    backends: list[str], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what attends from the last T of N tokens, ours and who else is there, with its name.

    q is [1, T, Hq, D], k and v are [1, N, Hk, D].
    """
    rows, keys = q.shape[1], k.shape[1]
    length = torch.full((1,), keys - rows, dtype=torch.int32, device=q.device)

    def ours(name: str) -> Any:
        with using(name):
            return specattn.hybrid_tree_attention(q, k, v, length, None, None, None)[0]

    for name in backends:
        yield name, partial(ours, name)
    yield "torch SDPA", _sdpa(q, k, v)
    library = flash_attention.loaded("flashinfer")
    if not isinstance(library, str):
        yield "flashinfer", partial(_flashinfer, library, q, k, v)
    for name in flash_attention.MODULES:
        library = flash_attention.loaded(name)
        if not isinstance(library, str):
            yield from flash_attention.calls(name, library, q, k, v, length + rows).items()


def _flashinfer(
    library: ModuleType, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    if q.shape[1] == 1:
        return library.single_decode_with_kv_cache(q[0, 0], k[0], v[0])[None, None]
    return library.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=True)[None]


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """Return torch's own attention over the same chain, in the layout that it takes."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    mask = None
    if rows > 1:
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def _median(call: Callable[[], Any]) -> tuple[float, str]:
    """Return seconds of a call, and how they were measured."""

    def calls() -> None:
        for _ in range(_CALLS):
            call()

    calls()
    torch.cuda.synchronize()
    graph = CudaGraph(torch.cuda.graph_pool_handle())
    how, run = "in a graph", graph.replay
    try:
        graph.capture(calls)
    except RuntimeError:
        how, run = "one by one", calls
        torch.cuda.synchronize()

    def window() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / _CALLS

    window()
    return statistics.median(window() for _ in range(_WINDOWS)), how
