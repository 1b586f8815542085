"""Compiles the attention kernels of a model on a GPU before they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
    chain. Call it once per device and dtype, before decoding or capturing a graph. On a CPU, where
    nothing is compiled, it does nothing.

    Parameters
    ----------
    q_heads, kv_heads, head_dim : int
        The attention shape of the model: Hq, Hk and D.
    capacity : int
        Tokens per request that the cache has room for: N.
    dtype : torch.dtype
        Of queries and caches.
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
        `sparse_gather_attention` are compiled too.
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
    sizes = (q_heads, kv_heads, head_dim, capacity, max_rows, max_batch, page_size or 1)
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"warmup: expected positive sizes, got {sizes}")
    device = torch.device(device)
    if device.type == "cpu":
        return

    def some(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=device)

    options: dict[str, Any] = {"softcap": softcap}
    with torch.no_grad():
        for batch, rows in itertools.product(range(1, max_batch + 1), range(1, max_rows + 1)):
            q, tree = some(batch, rows, q_heads, head_dim), some(batch, rows, kv_heads, head_dim)
            lengths, table = some(batch, of=torch.int32).zero_(), None
            # With a real cache's strides, which TMA descriptors hold; requests may share one.
            room = min(capacity, _ROOM)
            cache = some(1, room, kv_heads, head_dim).expand(batch, -1, -1, -1)
            if page_size is not None:
                cache = some(2, page_size, kv_heads, head_dim)
                table = some(batch, -(-capacity // page_size), of=torch.int32)
            nodes = some(rows, -(-rows // 64), of=torch.int64).zero_()
            for mask in (nodes, None):
                pass_ = (q, cache, cache, lengths, tree, tree, mask)
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
