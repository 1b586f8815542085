"""Conversion of every accepted form of tree mask into the one that backends read."""

from __future__ import annotations

import torch

from specattn.reference.tree_mask import (
    pack_tree_mask,
    tree_depths,
    trim_tree_mask,
    visible_tree_keys,
)


def packed_mask(
    tree_mask: torch.Tensor | None, sizes: dict[str, int], window: int | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `(mask, depths)`: int64 [B or 1, T, W], or None for a causal chain; int32 or None.

    With a window, `depths` [B or 1, T] are those of the whole mask, and the mask keeps only what
    the window leaves: backends window the prefix alone.
    """
    rows, keys = sizes["T"], sizes["S"]
    if window is None:
        return _packed(tree_mask), None
    if tree_mask is None and window >= keys:
        return None, None
    visible = visible_tree_keys(tree_mask, rows, keys, device)
    return pack_tree_mask(trim_tree_mask(visible, window)), tree_depths(visible)


def _packed(tree_mask: torch.Tensor | None) -> torch.Tensor | None:
    if tree_mask is None:
        return None
    packed = pack_tree_mask(tree_mask) if tree_mask.dtype == torch.bool else tree_mask
    return packed if packed.dim() == 3 else packed[None]
