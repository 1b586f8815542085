"""Importance of each cached token: its mean logit over the query rows."""

from __future__ import annotations

import torch

from ._check import check_tensors
from ._library import call, define
from ._options import flag, number
from ._scales import cache_views, scale_inputs, scale_tensors
from ._specs import accumulation_dtype
from .cost import Cost, Sizes

_operator = define(
    "importance_scores(Tensor q, Tensor k_cache, Tensor cache_seqlens, bool per_head, "
    "Tensor? block_table, float softmax_scale, Tensor? k_scale, Tensor(a!) scores)"
)


def importance_scores(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    per_head: bool = True,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    cache_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Score every cached token by its mean scaled logit over the query rows.

    Each KV head is read once for all g * T query rows that share it (TokenSwift, arXiv 2502.18890,
    section 3.3).

    Parameters
    ----------
    q : Tensor [B, T, Hq, D]
        float32, bfloat16 or float16; float64 on the reference. D is a multiple of 8 up to 576.
    k_cache : Tensor
        Contiguous [B, N, Hk, D], or with `block_table` paged [pages, page_size, Hk, D]; dtype as
        `q`, or int8, float8_e4m3fn or float8_e5m2; Hq a multiple of Hk. What lies beyond
        `cache_seqlens` may be NaN.
    cache_seqlens : Tensor [B], int32
        Tokens of each request that lie in the cache.
    per_head : bool
        One score per KV head, or one over all heads.
    block_table : Tensor [B, max_pages], int32, optional
        Pages of each request in order; entries behind its last token are not read.
    softmax_scale : float, optional
        Factor of the logits; D**-0.5 by default.
    k_scale, cache_dtype
        Of a cache of 8 bits, as in `hybrid_tree_attention`.

    Returns
    -------
    scores : Tensor [B, Hk, N], or [B, N] without `per_head`, float32
        -inf beyond `cache_seqlens`; N is the capacity of a request.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device or stride; the message names it.
    IndexError
        A length or a used page lies outside the cache. On a GPU only with ``SPECATTN_CHECK=1``.

    Examples
    --------
    >>> import torch, specattn
    >>> q, k_cache = torch.randn(1, 4, 8, 64), torch.randn(1, 128, 2, 64)
    >>> lengths = torch.tensor([100], dtype=torch.int32)
    >>> specattn.importance_scores(q, k_cache, lengths).shape
    torch.Size([1, 2, 128])
    """
    (k_cache,) = cache_views(cache_dtype, k_cache=k_cache)
    scales = scale_tensors(q, k_scale=k_scale)
    sizes = check_tensors(
        q=q, k_cache=k_cache, cache_seqlens=cache_seqlens, block_table=block_table, **scales
    )
    per_head, softmax_scale = flag("per_head", per_head), number("softmax_scale", softmax_scale)
    scale = sizes["D"] ** -0.5 if softmax_scale is None else softmax_scale
    heads = (sizes["Hk"],) if per_head else ()
    shape = (sizes["B"], *heads, sizes["N"])
    scores = torch.empty(shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    inputs = (q, k_cache, cache_seqlens, per_head, block_table, scale)
    call(_operator, sizes, *inputs, *scale_inputs(scales, sizes), scores)
    return scores


def cost(s: Sizes) -> Cost:
    """Count K, read once: the mean of scaled logits is the logit of the mean query."""
    return Cost(
        read=s.queries + s.keys(s.L) + 4 * s.indices,
        written=4 * s.B * s.score_rows * s.N,
        operations=2 * s.B * s.Hk * s.L * s.D,
    )
