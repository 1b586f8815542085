"""Tree masks: which tree keys each query row sees, as booleans or as bits of int64 words."""

import torch

WORD_BITS = 64


def pack_tree_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pack bool [.., T, S] into int64 [.., T, ceil(S / 64)]; bit j of word w is key 64w + j."""
    words = -(-mask.shape[-1] // WORD_BITS)
    padded = torch.nn.functional.pad(mask, (0, words * WORD_BITS - mask.shape[-1]))
    bits = padded.unflatten(-1, (words, WORD_BITS)).long()
    return (bits << torch.arange(WORD_BITS, device=mask.device)).sum(-1)  # distinct bits: sum is or


def unpack_tree_mask(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Return the bool mask [.., T, size] of packed words; bits from `size` on are dropped."""
    bits = packed[..., None] >> torch.arange(WORD_BITS, device=packed.device) & 1
    return bits.flatten(-2)[..., :size].bool()


def tree_depths(mask: torch.Tensor) -> torch.Tensor:
    """Return each row's depth, int32 [.., T]: the tree keys it sees besides itself."""
    if mask.dtype != torch.bool:
        mask = unpack_tree_mask(mask, mask.shape[-1] * WORD_BITS)
    return mask.sum(-1, dtype=torch.int32) - 1


def trim_tree_mask(mask: torch.Tensor, window: int) -> torch.Tensor:
    """Keep the last `window` visible keys of each row of a bool mask.

    What a row sees is its path in index order, so the distance to key j is the count of visible
    keys after j: this is the sliding window in positions, whatever the order of the rows.
    """
    seen = mask.int()
    at_or_after = seen.flip(-1).cumsum(-1).flip(-1)
    return mask & (at_or_after <= window)


def visible_tree_keys(tree_mask, rows: int, size: int, device=None) -> torch.Tensor:
    """Return any accepted form of tree mask as bool [B or 1, T, S]; None is a causal chain."""
    if tree_mask is None:
        chain = torch.ones(rows, size, dtype=torch.bool, device=device)
        return chain.tril(size - rows)[None]
    if tree_mask.dtype != torch.bool:
        tree_mask = unpack_tree_mask(tree_mask, size)
    return tree_mask if tree_mask.dim() == 3 else tree_mask[None]
