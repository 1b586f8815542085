"""The drafter's two attentions over whole sequences, as training needs them: no [L, L] mask."""

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

    The sequence is cut into blocks of `window` tokens. Positions grow by at least one per token, so
    a row's keys lie in its own block and the one before: masks take ``2 * L * window``, not L * L.

    Parameters
    ----------
    q : Tensor [B, L, Hq, D]
    k, v : Tensor [B, L, Hk, D]
    position_ids : Tensor, integer [B, L]
        Strictly increasing along L.
    window : int
        In positions, the row's own included: a row at position t sees p with t - window < p <= t.

    Returns
    -------
    Tensor [B, L, Hq, D]
    """
    batch, length, *_ = q.shape
    block = min(window, length)
    blocks = -(-length // block)
    spare = blocks * block - length
    rows = (0, 0, 0, 0, 0, spare)
    # Padding behind the text is seen by nobody; padding before it is farther away than any window.
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
    `shift` keys makes it plain causal attention. Tokens that see no key get 0.

    Parameters
    ----------
    q : Tensor [B, L, Hq, D]
    target_keys, target_values : Tensor [B, L, Hk, D]
        Keys already rotated.
    shift : int
        From 0 to L - 1.

    Returns
    -------
    Tensor [B, L, Hq, D]
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


_PATH_ROWS = 128  # queries at a time: what no later row sees is left out of the products


def path_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_path: torch.Tensor | None = None,
    v_path: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from row t to the text up to t, and to keys that are row t's alone.

    So a draft behind every token of a text sees what it would see at inference: the text, causal,
    and its own earlier tokens (HASS' harmonized context alignment; a hidden key weighs nothing).

    Parameters
    ----------
    q : Tensor [B, L, Hq, D]
    k, v : Tensor [B, L, Hk, D]
        Of the text.
    k_path, v_path : Tensor [B, L, S, Hk, D], optional
        Of each row's own path.

    Returns
    -------
    Tensor [B, L, Hq, D]
    """
    length, groups = q.shape[1], q.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.permute(0, 2, 3, 1), v.transpose(1, 2)
    outs = []
    for start in range(0, length, _PATH_ROWS):
        end = min(start + _PATH_ROWS, length)
        # [B, Hk, g, rows, D]: the rows of a group are one matrix, so no key is repeated.
        rows = q[:, start:end].unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)
        rows = rows * q.shape[-1] ** -0.5
        logits = (rows.flatten(2, 3) @ k[..., :end]).unflatten(2, (groups, -1)).to(wide)
        hidden = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu(start + 1)
        logits = logits.masked_fill(hidden, float("-inf"))
        if k_path is not None:
            k_own = k_path[:, start:end].permute(0, 3, 1, 2, 4)[
                :, :, None
            ]  # [B, Hk, 1, rows, S, D]
            logits = torch.cat([logits, (rows[..., None, :] * k_own).sum(-1).to(wide)], -1)
        weights = logits.softmax(-1).to(v.dtype)
        out = (weights[..., :end].flatten(2, 3) @ v[:, :, :end]).unflatten(2, (groups, -1))
        if v_path is not None:
            v_own = v_path[:, start:end].permute(0, 3, 1, 2, 4)[:, :, None]
            out = out + (weights[..., end:, None] * v_own).sum(-2)
        outs.append(out)
    return torch.cat(outs, 3).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _with_previous(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return blocks with the one before: [B, (n + 1) * block, ...] to [B, n, 2 * block, ...]."""
    blocks = x.unflatten(1, (-1, block))
    return torch.cat([blocks[:, :-1], blocks[:, 1:]], 2)
