"""Attention over transformers' keys and values as views, whatever their padding and layout.

Nothing is copied. Heads that are not contiguous are requests of their own; requests that begin
behind padding are pages that begin there.
"""

from __future__ import annotations

from typing import Any

import torch

from specattn.ops import hybrid_tree_attention

from .masks import Visible

_LEAST_PAGE = 16  # tokens; with smaller pages each request has a call of its own


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    sinks: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend from the last T of the seen and new keys; q, k and v are [B, n, heads, D]."""
    if visible.trailing:
        if sinks is None and _heads_outside(k, v):
            return _folded(q, k, v, visible, options)
        firsts = [first for first, _ in visible.spans or ()]
        return _together(q, k, v, firsts, visible, options | {"sinks": sinks})
    out = torch.zeros_like(q)
    for b, (first, end) in enumerate(visible.spans or ()):
        start = max(first, visible.seen)
        if end > start:
            one, rows = slice(b, b + 1), slice(start - visible.seen, end - visible.seen)
            keys = slice(first, end)
            own = Visible(start - first, end - start, visible.window, None, {})
            out[one, rows] = attend(q[one, rows], k[one, keys], v[one, keys], own, sinks, options)
    return out


def _heads_outside(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether each head's keys lie together, all requests in one stride, as transformers has it."""
    return k.device.type == "cpu" and all(
        x.stride(2) > x.stride(1) and (len(x) == 1 or x.stride(0) == x.stride(2) * x.shape[2])
        for x in (k, v)
    )


def _folded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, options: dict[str, Any]
) -> torch.Tensor:
    """Attend with every KV head as a request of its own.

    The CPU kernels read a token's heads one after the other, which is fast where they are adjacent.
    In this layout it takes up to 1.9 times as long as this does (docs/log.md).
    """
    (batch, rows, heads, dim), kv_heads = q.shape, k.shape[2]
    k, v = (x.transpose(1, 2).flatten(0, 1).unsqueeze(2) for x in (k, v))
    q = (
        q.view(batch, rows, kv_heads, -1, dim)
        .transpose(1, 2)
        .reshape(-1, rows, heads // kv_heads, dim)
    )
    firsts = [first for first, _ in visible.spans or () for _ in range(kv_heads)]
    out = _together(q, k, v, firsts, visible, options)
    return out.view(batch, kv_heads, rows, -1, dim).transpose(1, 2).reshape(batch, rows, heads, dim)


def _together(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    firsts: list[int],
    visible: Visible,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend in one call, request b from key ``firsts[b]`` on; empty: all from the first.

    Requests that begin anywhere are pages that begin anywhere: the cache is read as pages that
    overlap, each one token behind the one before it, so a page begins at every token.
    """
    lengths = visible.once(
        ("lengths", len(q)), lambda: _lengths(len(q), visible.seen, firsts, q.device)
    )
    cache: dict[str, Any] = {}
    if len(q) == 1 and firsts:
        k, v = k[:, firsts[0] :], v[:, firsts[0] :]
    elif firsts:
        end = visible.seen + visible.rows
        page_size = end - firsts[-1]
        if page_size < _LEAST_PAGE or not _pageable(k, v):
            return _each(q, k, v, firsts, visible, options)
        table, pages = visible.once(
            ("block_table", k.stride()), lambda: _block_table(k, firsts, page_size, end)
        )
        k, v = (_overlapping(x, page_size, pages) for x in (k, v))
        cache["block_table"] = table
    return hybrid_tree_attention(q, k, v, lengths, None, None, **cache, **options)[0]


def _each(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    firsts: list[int],
    visible: Visible,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend as `_together`, in one call per request."""
    outs = []
    for b, first in enumerate(firsts):
        one = slice(b, b + 1)
        own = Visible(visible.seen - first, visible.rows, visible.window, None, {})
        outs.append(_together(q[one], k[one, first:], v[one, first:], [], own, options))
    return torch.cat(outs)


def _lengths(batch: int, seen: int, firsts: list[int], device: torch.device) -> torch.Tensor:
    lengths = [seen - first for first in firsts] or [seen] * batch
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def _pageable(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a request begins at a whole number of tokens behind the first one."""
    return k.stride() == v.stride() and k.stride(0) % k.stride(1) == 0


def _block_table(
    k: torch.Tensor, firsts: list[int], page_size: int, end: int
) -> tuple[torch.Tensor, int]:
    """Return a block table, int32 [B, max_pages], of requests up to token `end`, and all pages.

    The last request's one page ends with it. So no page reaches beyond the cache: those of other
    requests end less than a page, which is at most a request, behind their own.
    """
    begin = torch.tensor(firsts, device="cpu") + torch.arange(len(firsts), device="cpu") * (
        k.stride(0) // k.stride(1)
    )
    pages = -(-(end - torch.tensor(firsts, device="cpu")) // page_size)
    number = torch.arange(int(pages.max()), device="cpu").minimum(pages[:, None] - 1)
    table = begin[:, None] + number * page_size
    return table.to(k.device, torch.int32), int(table.max()) + 1


def _overlapping(x: torch.Tensor, page_size: int, pages: int) -> torch.Tensor:
    """Return a cache [B, N, Hk, D] as pages [pages, page_size, Hk, D] that overlap."""
    token, head = x.stride(1), x.stride(2)
    return x.as_strided((pages, page_size, *x.shape[2:]), (token, token, head, 1))
