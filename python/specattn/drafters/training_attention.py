"""LongSpec's two attentions over whole sequences, for training: no [L, L] mask."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


def windowed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position_ids: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """Attend from every token to those before it that are less than `window` positions away.

    Queries are [B, L, Hq, D], keys and values [B, L, Hk, D]; a row at position t sees p with
    t - window < p <= t. Positions, integer [B, L], grow by at least one per token: cut into blocks
    of `window` tokens, a row's keys lie in its own block and the one before, so masks take
    ``2 * L * window``, not L * L.
    """
    batch, length, *_ = q.shape
    block = min(window, length)
    blocks = -(-length // block)
    spare = blocks * block - length
    rows = (0, 0, 0, 0, 0, spare)
    # No row sees padding behind the text; padding before it is farther away than any window.
    ahead = (0, 0, 0, 0, block, spare)
    q_blocks = pad(q, rows).unflatten(1, (blocks, block))
    k_blocks, v_blocks = (_with_previous(pad(x, ahead), block) for x in (k, v))
    far = torch.iinfo(torch.int64).max // 2
    positions = position_ids.long().expand(batch, length)
    at = pad(positions, (0, spare), value=far).unflatten(1, (blocks, block))[..., None]
    key_positions = pad(pad(positions, (block, 0), value=-far), (0, spare), value=far)
    of = _with_previous(key_positions, block)[:, :, None]
    visible = (of <= at) & (of > at - window)
    out = scaled_dot_product_attention(
        q_blocks.flatten(0, 1).transpose(1, 2),
        k_blocks.flatten(0, 1).transpose(1, 2),
        v_blocks.flatten(0, 1).transpose(1, 2),
        attn_mask=visible.flatten(0, 1)[:, None],
        enable_gqa=True,
    )
    return out.transpose(1, 2).unflatten(0, (batch, blocks)).flatten(1, 2)[:, :length]


def shifted_attention(
    q: torch.Tensor, target_keys: torch.Tensor, target_values: torch.Tensor, shift: int
) -> torch.Tensor:
    """Attend from token t to the target's keys of tokens up to ``t - shift``, without any mask.

    Flash noisy training (LongSpec v2, Algorithm 2): dropping the first `shift` queries and the last
    `shift` keys makes it plain causal attention. Queries are [B, L, Hq, D], keys (rotated) and
    values [B, L, Hk, D], `shift` from 0 to L - 1; tokens that see no key get 0.
    """
    seen = q.shape[1] - shift
    out = scaled_dot_product_attention(
        q[:, shift:].transpose(1, 2),
        target_keys[:, :seen].transpose(1, 2),
        target_values[:, :seen].transpose(1, 2),
        is_causal=True,
        enable_gqa=True,
    )
    return pad(out.transpose(1, 2), (0, 0, 0, 0, shift, 0))


def _with_previous(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return blocks with the one before: [B, (n + 1) * block, ...] to [B, n, 2 * block, ...]."""
    blocks = x.unflatten(1, (-1, block))
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], 2)
