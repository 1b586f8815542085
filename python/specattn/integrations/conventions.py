"""Arguments of FlashInfer and of flash-attn (vLLM) as those of `specattn.hybrid_tree_attention`.

There a length counts the step's own tokens, which are stored already; here it does not count them,
and so the tree's keys and values are None. docs/engines.md has the table.
"""

from __future__ import annotations

from typing import Any

import torch


def from_flashinfer(
    qo_indptr: torch.Tensor,
    paged_kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    page_size: int,
    *,
    custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    window_left: int = -1,
) -> dict[str, Any]:
    """Convert what ``BatchPrefillWithPagedKVCacheWrapper.plan`` takes; once a step, as that.

    Caches are handed over as they are, NHD ``[pages, page_size, Hk, D]``, or HND transposed. Their
    `lse`, to base 2, is ``lse_to_log2(lse)``.

    Parameters
    ----------
    qo_indptr, paged_kv_indptr : Tensor [B + 1], int32
        Where each request's rows and pages begin.
    paged_kv_indices : Tensor [pages in use], int32
        Pages of the requests, one after the other.
    paged_kv_last_page_len : Tensor [B], int32
        Tokens in each request's last page.
    page_size : int
        Tokens of a page.
    custom_mask : Tensor [sum of rows * keys], bool, optional
        Flat: for each request its rows over all its keys. All rows must see the whole prefix.
    causal : bool
        Without a mask: whether a row sees only the rows before it, or every row of its request.
    sm_scale, logits_soft_cap : float, optional
        ``softmax_scale`` and ``softcap``.
    window_left : int
        Tokens that a row sees before itself; -1 for all.

    Returns
    -------
    dict
        Keyword arguments of `specattn.hybrid_tree_attention`, but `q`, `k_cache` and `v_cache`.

    Raises
    ------
    ValueError
        `custom_mask` hides a token of a prefix, or is of a wrong size.
    """
    rows, pages = qo_indptr.diff(), paged_kv_indptr.diff()
    keys = (pages - 1).clamp(min=0) * page_size + paged_kv_last_page_len * (pages > 0)
    column = torch.arange(int(pages.max()), device=pages.device)
    own = column < pages[:, None]
    table = paged_kv_indices.new_zeros(own.shape)
    table[own] = paged_kv_indices[: int(pages.sum())]
    most = max(1, int(rows.max()))
    return {
        "cache_seqlens": (keys - rows).int(),
        "k_tree": None,
        "v_tree": None,
        "tree_mask": _tree_mask(rows.tolist(), keys.tolist(), most, custom_mask, causal),
        "block_table": table.int(),
        "window": None if window_left < 0 else window_left + 1,
        "softmax_scale": sm_scale,
        "softcap": logits_soft_cap or 0.0,
        "cu_seqlens_q": qo_indptr.int(),
        "max_seqlen_q": most,
    }


def _tree_mask(
    rows: list[int], keys: list[int], most: int, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor | None:
    """Return the columns of a request's own rows, [tokens, most], of a mask over all keys."""
    if mask is None and causal:
        return None
    size = sum(row * key for row, key in zip(rows, keys, strict=True))
    if mask is None:
        mask = torch.ones(size, dtype=torch.bool, device="cpu")
    if mask.numel() != size:
        raise ValueError(f"custom_mask: expected {size} elements, got {mask.numel()}")
    found, first = mask.new_zeros(sum(rows), most), 0
    parts = mask.split([row * key for row, key in zip(rows, keys, strict=True)])
    for row, key, part in zip(rows, keys, parts, strict=True):
        part = part.view(row, key)
        if not part[:, : key - row].all():
            raise ValueError("custom_mask: expected every row to see its whole prefix")
        found[first : first + row, :row] = part[:, key - row :]
        first += row
    return found


def from_flash_attention(
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Convert what ``flash_attn_varlen_func`` takes of a causal call over pages, as vLLM calls it.

    No call waits for the device. `lse`, [Hq, tokens] there, is ``lse_heads_first(lse)``.

    Parameters
    ----------
    cu_seqlens_q : Tensor [B + 1], int32
        Where each request's rows begin.
    max_seqlen_q : int
        Rows that no request exceeds.
    seqused_k : Tensor [B], int32
        Keys of each request, its rows' own included (vLLM's ``seq_lens``).
    block_table : Tensor [B, max_pages], int32
        Pages of each request.
    softmax_scale : float, optional
        D**-0.5 by default.
    window_size : tuple of int
        Tokens that a row sees before itself, -1 for all; and 0 or -1.
    softcap : float
        0 for none.
    s_aux : Tensor [Hq], optional
        ``sinks``.

    Returns
    -------
    dict
        Keyword arguments of `specattn.hybrid_tree_attention`, but `q`, `k_cache` and `v_cache`.
    """
    return {
        "cache_seqlens": seqused_k - cu_seqlens_q.diff(),
        "k_tree": None,
        "v_tree": None,
        "block_table": block_table,
        "window": None if window_size[0] < 0 else window_size[0] + 1,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "sinks": s_aux,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
    }
