"""Conversion of every accepted form of tree mask into the one that backends read."""

from __future__ import annotations

import torch

from ..reference.tree_mask import (
    pack_tree_mask,
    tree_depths,
    trim_tree_mask,
    unpack_tree_mask,
    visible_tree_keys,
)


def packed_mask(
    tree_mask: torch.Tensor | None,
    sizes: dict[str, int],
    window: int | None,
    device: torch.device,
    *,
    trim: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `(mask, depths)`: int64 [B or 1, T, W], or None for a causal chain; int32 or None.

    With a window, `depths` [B or 1, T] are those of the whole mask, and the mask keeps only what
    the window leaves. Without `trim` the mask stays whole and `depths` are None.
    """
    rows, keys = sizes["T"], sizes["S"]
    if window is None or not trim:
        return _packed(tree_mask), None
    if tree_mask is None and window >= keys:
        return None, None
    visible = visible_tree_keys(tree_mask, rows, keys, device)
    return pack_tree_mask(trim_tree_mask(visible, window)), tree_depths(visible)


def ragged_packed_mask(
    tree_mask: torch.Tensor | None,
    sizes: dict[str, int],
    window: int | None,
    cu_seqlens_q: torch.Tensor,
    *,
    trim: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `(mask, depths)` of ragged rows as `packed_mask` does: int64 [tokens, W], [tokens].

    Backends window a chain themselves: for None both are None.
    """
    if tree_mask is None:
        return None, None
    if window is None or not trim:
        return pack_tree_mask(tree_mask) if tree_mask.dtype == torch.bool else tree_mask, None
    keys = sizes["max_seqlen_q"]
    visible = tree_mask if tree_mask.dtype == torch.bool else unpack_tree_mask(tree_mask, keys)
    visible = visible & _own_keys(len(tree_mask), keys, cu_seqlens_q)
    return pack_tree_mask(trim_tree_mask(visible, window)), tree_depths(visible)


def _own_keys(tokens: int, keys: int, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """Return which of the columns of a ragged mask a row's request has, bool [tokens, keys]."""
    starts, stops = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    rows = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens_q.device)
    # Rows of no request are an error, which the operator finds: here they must only do no harm.
    request = torch.searchsorted(stops, rows, right=True).clamp(max=len(starts) - 1)
    columns = torch.arange(keys, device=cu_seqlens_q.device)
    return columns < (stops - starts)[request, None]


def _packed(tree_mask: torch.Tensor | None) -> torch.Tensor | None:
    if tree_mask is None:
        return None
    packed = pack_tree_mask(tree_mask) if tree_mask.dtype == torch.bool else tree_mask
    return packed if packed.dim() == 3 else packed[None]
