"""Times of attention over 32k keys on a GPU, ours beside what is installed, for ``gpu-check``."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

import specattn
from specattn.cli.gpu_cases import using

KEYS, Q_HEADS, KV_HEADS, D = 32768, 32, 8, 128
ROWS = (1, 16)
FLASH_ATTN = {
    "flash-attn 2": "flash_attn",
    "flash-attn 3": "flash_attn_interface",
    "fa3-fwd": "fa3_fwd_interface",
    "flash-attn 4": "flash_attn.cute",
}
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
        for name, call in _calls(backends, q, k[:, : KEYS + rows], v[:, : KEYS + rows]):
            try:
                seconds, said = _median(call)
                yield Time(rows, name, seconds, said, size)
            except Exception as error:  # an interface of another version, or no kernel for this GPU
                text = " ".join(str(error).split())[:120]
                yield Time(rows, name, None, f"{type(error).__name__}: {text}", size)


def _calls(
    backends: list[str], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[str, Callable[[], Any]]]:
    rows, length = q.shape[1], torch.full((1,), KEYS, dtype=torch.int32, device="cuda")

    def ours(name: str) -> Any:
        with using(name):
            return specattn.hybrid_tree_attention(q, k, v, length, None, None, None)

    for name in backends:
        yield name, partial(ours, name)
    yield "torch SDPA", _sdpa(q, k, v)
    yield "flashinfer", partial(_flashinfer, q, k, v)
    for name, module in FLASH_ATTN.items():
        yield name, partial(_flash_attn, module, q, k, v, length + rows)


def _flash_attn(
    module: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
) -> Any:
    library = importlib.import_module(module)
    if module == "flash_attn.cute":
        return library.flash_attn_func(q, k, v, causal=True)
    return library.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)


def _flashinfer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    library = importlib.import_module("flashinfer")
    if q.shape[1] == 1:
        return library.single_decode_with_kv_cache(q[0, 0], k[0], v[0])
    return library.single_prefill_with_kv_cache(q[0], k[0], v[0], causal=True)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """Return torch's own attention over the same chain, in the layout that it takes."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    mask = None
    if rows > 1:
        mask = torch.ones(rows, keys, dtype=torch.bool, device="cuda").tril(keys - rows)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, attn_mask=mask, enable_gqa=True)


def _median(call: Callable[[], Any]) -> tuple[float, str]:
    """Return seconds of a call, and how they were measured."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    how, run = "in a graph", None
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                call()
        run = graph.replay
    except RuntimeError:
        how = "one by one"
        torch.cuda.synchronize()

    def window() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if run is not None:
            run()
        else:
            for _ in range(_CALLS):
                call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / _CALLS

    window()
    return statistics.median(window() for _ in range(_WINDOWS)), how
