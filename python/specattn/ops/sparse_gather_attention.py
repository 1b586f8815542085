"""Attention to selected tokens of a cache, in place."""

from __future__ import annotations

from typing import Any

import torch

from ._check import check_option, check_tensors
from ._library import CACHE, STATE, call, define
from ._options import flag, number
from ._outputs import state_like
from ._ragged import ragged_rows
from ._scales import cache_views, scale_inputs, scale_tensors
from ._tree_mask import packed_mask, ragged_packed_mask
from .cost import Cost, Sizes
from .hybrid_tree_attention import cost as hybrid_cost

_operator = define(
    f"sparse_gather_attention({CACHE}, Tensor indices, Tensor index_lengths, Tensor? k_new, "
    "Tensor? v_new, Tensor? tree_mask, Tensor? block_table, float softmax_scale, float softcap, "
    f"Tensor? sinks, Tensor? cache_seqlens, Tensor? cu_seqlens_q, SymInt? max_seqlen_q, "
    f"Tensor? k_scale, Tensor? v_scale, bool per_row, {STATE})"
)


def sparse_gather_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    index_lengths: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    cache_dtype: torch.dtype | None = None,
    per_row: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to a list of cached tokens, read where they lie, and to new keys.

    A partial cache is a list of positions, never a copy: this is the draft pass of Vegas (arXiv
    2602.07223, section 3.2) with lists shared by all heads, and of TokenSwift (arXiv 2502.18890,
    section 3.3) with one list per KV head.

    Parameters
    ----------
    q : Tensor [B, T, Hq, D]
        float32, bfloat16 or float16; float64 on the reference. D is a multiple of 8 up to 576.
    k_cache, v_cache : Tensor
        As in `hybrid_tree_attention`; V may be a view of K.
    indices : Tensor [B, K], [B, Hk, K], or with `per_row` [B, T, K], int32
        Logical positions of the tokens to see, for all heads, for each KV head or for each row;
        best ascending. Each counts as often as it stands there.
    index_lengths : Tensor [B], [B, Hk] with indices per head, or [B, T] per row, int32
        How many of the indices count; the rest is never read. -1 stands for all positions of the
        prefix, as a request that does not draft sees them; its list is not read, and
        `cache_seqlens` is needed.
    k_new, v_new : Tensor [B, S, Hk, D] and [B, S, Hk, Dv], optional
        Keys and values of tokens that are not in the cache yet, dtype as `q`, S >= T.
    tree_mask : Tensor or None
        Which new keys a row sees, as `tree_attention` takes it; None is a causal chain.
    block_table : Tensor [B, max_pages], int32, optional
        Pages of each request in order.
    cache_seqlens : Tensor [B], int32, optional
        Tokens of each request that lie in the cache, for lists of length -1.
    per_row : bool
        Each row has a list of its own, which all its heads see (DeepSeek-V3.2's sparse attention).
        With `cu_seqlens_q` lists are [tokens, K] and their lengths [tokens].
    softmax_scale, softcap, sinks, cu_seqlens_q, max_seqlen_q, out, lse
    k_scale, v_scale, cache_dtype
        As in `hybrid_tree_attention`; with `cu_seqlens_q`, `k_new` and `v_new` are what `k_tree`
        and `v_tree` are there.

    Returns
    -------
    out : Tensor [B, T, Hq, Dv]
    lse : Tensor [B, T, Hq]
        As `hybrid_tree_attention` returns them.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device, stride or value; the message names it.
    IndexError
        An index, a length or a used page lies outside, a length is -1 without `cache_seqlens`, or
        `cu_seqlens_q` does not deal all rows. On a GPU only with ``SPECATTN_CHECK=1``.

    Examples
    --------
    >>> import torch, specattn
    >>> q, k_cache, v_cache = torch.randn(1, 1, 8, 64), *torch.randn(2, 1, 128, 2, 64)
    >>> indices = torch.tensor([[0, 1, 2, 97, 98, 99]], dtype=torch.int32)
    >>> index_lengths = torch.tensor([6], dtype=torch.int32)
    >>> out, lse = specattn.sparse_gather_attention(q, k_cache, v_cache, indices, index_lengths)
    >>> out.shape
    torch.Size([1, 1, 8, 64])
    """
    given = k_new is not None or v_new is not None
    new: dict[str, Any] = {}
    if given:
        new = {"k_new": k_new, "v_new": v_new, "tree_mask": tree_mask}
    prefix: dict[str, Any] = {} if cache_seqlens is None else {"cache_seqlens": cache_seqlens}
    ragged = ragged_rows(cu_seqlens_q, max_seqlen_q)
    per_row = flag("per_row", per_row)
    k_cache, v_cache = cache_views(cache_dtype, k_cache=k_cache, v_cache=v_cache)
    scales = scale_tensors(q, k_scale=k_scale, v_scale=v_scale)
    sizes = check_tensors(
        per_row=per_row,
        q=q,
        **ragged,
        k_cache=k_cache,
        v_cache=v_cache,
        indices=indices,
        index_lengths=index_lengths,
        block_table=block_table,
        **scales,
        sinks=sinks,
        out=out,
        lse=lse,
        **prefix,
        **new,
    )
    softcap, softmax_scale = number("softcap", softcap), number("softmax_scale", softmax_scale)
    check_option("tree_mask", "a mask", tree_mask is None or given, "None without new keys")
    if cu_seqlens_q is None:
        mask = packed_mask(tree_mask, sizes, None, q.device)[0] if given else None
    else:
        mask = ragged_packed_mask(tree_mask, sizes, None, cu_seqlens_q)[0]
    scale = sizes["D"] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = state_like(q, sizes["Dv"], out, lse)
    inputs = (q, k_cache, v_cache, indices, index_lengths, k_new, v_new, mask, block_table)
    rows = (cache_seqlens, cu_seqlens_q, ragged.get("max_seqlen_q"), *scale_inputs(scales, sizes))
    call(_operator, sizes, *inputs, scale, softcap, sinks, *rows, per_row, out, lse)
    return out, lse


def cost(s: Sizes) -> Cost:
    """Count hybrid attention to L selected keys; `indices` holds the lists and their lengths."""
    return hybrid_cost(s)
