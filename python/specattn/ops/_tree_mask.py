"""Bringing every accepted form of tree mask into the one that backends read."""

from __future__ import annotations

import torch

from specattn.reference.tree_mask import (
    WORD_BITS,
    pack_tree_mask,
    tree_depths,
    trim_tree_mask,
    visible_tree_keys,
)

from ._check import SPECS, check_tensor


def packed_mask(
    tree_mask: torch.Tensor | None, q: torch.Tensor, sizes: dict[str, int], window: int | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `(mask, depths)`: int64 [B or 1, T, W], or None for a causal chain; int32 or None.

    With a window, `depths` [B or 1, T] are those of the whole mask, and the mask keeps only what
    the window leaves: backends window the prefix alone.
    """
    rows, keys = sizes["T"], sizes["S"]
    if tree_mask is not None:
        _check_mask(tree_mask, q, sizes)
    if window is None:
        return _packed(tree_mask), None
    if tree_mask is None and window >= keys:
        return None, None
    visible = visible_tree_keys(tree_mask, rows, keys, q.device)
    return pack_tree_mask(trim_tree_mask(visible, window)), tree_depths(visible)


def _check_mask(tree_mask, q: torch.Tensor, sizes: dict[str, int]) -> None:
    packed = isinstance(tree_mask, torch.Tensor) and tree_mask.dtype == torch.int64
    sizes = sizes | {"W": -(-sizes["S"] // WORD_BITS)}
    spec = SPECS["packed_tree_mask" if packed else "tree_mask"]
    check_tensor("tree_mask", tree_mask, spec, q, "q", sizes)


def _packed(tree_mask: torch.Tensor | None) -> torch.Tensor | None:
    if tree_mask is None:
        return None
    packed = pack_tree_mask(tree_mask) if tree_mask.dtype == torch.bool else tree_mask
    return packed if packed.dim() == 3 else packed[None]
