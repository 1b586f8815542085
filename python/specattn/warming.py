"""Compiles the attention kernels of a model on a GPU before they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from . import ops

_ROOM = 8192  # tokens: a longer cache launches no other kernels


def warmup(
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    cache_scales: str = "tokens",
    device: torch.device | str = "cuda",
    max_rows: int = 64,
    max_batch: int = 1,
    page_size: int | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    selection: float | None = None,
    collect_rows: Sequence[int] | None = None,
) -> None:
    """Compile the attention kernels of a model, so that no call of a decode loop does.

    Every combination of rows and requests is called on empty prefixes, with a tree and with a
    chain; Triton's kernels are compiled before, in as many threads as there are cores. Call it once
    per device and dtype, before decoding or capturing a graph. On a CPU, where nothing is compiled,
    it does nothing.

    Parameters
    ----------
    q_heads, kv_heads, head_dim : int
        The attention shape of the model: Hq, Hk and D.
    capacity : int
        Tokens per request that the cache has room for: N.
    dtype : torch.dtype
        Of queries, and of caches without `cache_dtype`.
    cache_dtype : torch.dtype, optional
        Of caches of 8 bits.
    cache_scales : {"none", "heads", "tokens"}
        What scales these have; numbers are those of heads.
    device : torch.device or str
    max_rows, max_batch : int
        The most rows T of a request and requests B of a call.
    page_size : int, optional
        Tokens per page; without it the cache is contiguous.
    window : int, optional
        As in `hybrid_tree_attention`.
    softcap : float
        As in `hybrid_tree_attention`.
    selection : float, optional
        Share of the cached tokens that drafts attend to; with it `select_topk` per KV head and
        `sparse_gather_attention` to what it selects are compiled too.
    collect_rows : sequence of int, optional
        With it `verify_attention` is compiled too, for scores of these rows.

    Raises
    ------
    TypeError, ValueError
        A size is none, or what the primitives refuse.

    Examples
    --------
    >>> import specattn
    >>> specattn.warmup(q_heads=32, kv_heads=8, head_dim=128, capacity=4096, device="cpu")
    """
    if cache_scales not in ("none", "heads", "tokens"):
        raise ValueError(
            f"cache_scales: expected 'none', 'heads' or 'tokens', got {cache_scales!r}"
        )
    sizes = (q_heads, kv_heads, head_dim, capacity, max_rows, max_batch, page_size or 1)
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"warmup: expected positive sizes, got {sizes}")
    device = torch.device(device)
    if device.type == "cpu":
        return

    def some(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=device)

    def call_all() -> None:
        for batch, rows in itertools.product(range(1, max_batch + 1), range(1, max_rows + 1)):
            q, tree = some(batch, rows, q_heads, head_dim), some(batch, rows, kv_heads, head_dim)
            lengths, table = some(batch, of=torch.int32).zero_(), None
            # With a real cache's strides, which TMA descriptors hold; requests may share one.
            room = min(capacity, _ROOM)
            tokens = (1, room) if page_size is None else (2, page_size)
            cache = some(*tokens, kv_heads, head_dim, of=cache_dtype or dtype)
            scale = None
            if cache_dtype is not None and cache_scales != "none":
                outer = tokens if cache_scales == "tokens" else ()
                scale = some(*outer, kv_heads, of=torch.float32)
            if page_size is None:
                cache = cache.expand(batch, -1, -1, -1)
                if scale is not None and scale.dim() == 3:
                    scale = scale.expand(batch, -1, -1)
            else:
                table = some(batch, -(-capacity // page_size), of=torch.int32)
            nodes = some(rows, -(-rows // 64), of=torch.int64).zero_()
            for mask in (nodes, None):
                pass_ = (q, cache, cache, lengths, tree, tree, mask)
                options: dict[str, Any] = {"softcap": softcap, "k_scale": scale, "v_scale": scale}
                ops.hybrid_tree_attention(*pass_, block_table=table, window=window, **options)
                if collect_rows is not None:
                    kept = [row for row in collect_rows if -rows <= row < rows] or [-1]
                    ops.verify_attention(
                        *pass_, block_table=table, window=window, collect_rows=kept, **options
                    )
                if selection is not None:
                    scores = some(batch, kv_heads, capacity, of=torch.float32)
                    chosen = ops.select_topk(scores, lengths, ratio=selection)
                    ops.sparse_gather_attention(
                        q, cache, cache, *chosen, tree, tree, mask, block_table=table, **options
                    )

    with torch.no_grad():
        if find_spec("triton"):
            from .triton_kernels._ahead import compiling

            with compiling():
                call_all()
        call_all()  # which compares what is new on a device, and plans launches
