"""Attention to a cached prefix, which needs no mask, merged with a masked tree."""

from __future__ import annotations

from typing import Any

import torch

from ._check import check_tensors
from ._library import CACHE, STATE, call, define, trims_masks
from ._options import LARGEST, number
from ._outputs import state_like
from ._ragged import ragged_rows
from ._scales import cache_views, scale_inputs, scale_tensors
from ._tree_mask import packed_mask, ragged_packed_mask
from .cost import Cost, Sizes
from .tree_attention import cost as tree_cost

HYBRID = (
    f"{CACHE}, Tensor cache_seqlens, Tensor? k_tree, Tensor? v_tree, Tensor? tree_mask, "
    "Tensor? depths, Tensor? block_table, int? window, float softmax_scale, float softcap, "
    "Tensor? sinks, Tensor? cu_seqlens_q, SymInt? max_seqlen_q, Tensor? k_scale, Tensor? v_scale"
)
_operator = define(f"hybrid_tree_attention({HYBRID}, {STATE})")


def hybrid_tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    k_tree: torch.Tensor | None,
    v_tree: torch.Tensor | None,
    tree_mask: torch.Tensor | None = None,
    *,
    block_table: torch.Tensor | None = None,
    window: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    cache_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from drafted tokens to the cached prefix of their request and to the draft tree.

    Every row sees the whole prefix, so only the few tree keys need a mask (LongSpec, arXiv
    2502.17421, section 3.3). T = 1 without a mask is plain decoding; a chain is a draft without
    branches.

    Parameters
    ----------
    q : Tensor [B, T, Hq, D]
        float32, bfloat16 or float16; float64 on the reference. D is a multiple of 8 up to 576.
    k_cache, v_cache : Tensor
        Contiguous [B, N, Hk, D] and [B, N, Hk, Dv], or with `block_table` paged
        [pages, page_size, Hk, D] and [.., Dv]; dtype as `q`, or both int8, float8_e4m3fn or
        float8_e5m2; Hq a multiple of Hk, Dv a multiple of 8 up to 512. What lies beyond
        `cache_seqlens` may be NaN. The values of latents (DeepSeek-V2, arXiv 2405.04434, section
        2.1) are a view of the keys, ``k_cache[..., :512]``, and are then read once.
    cache_seqlens : Tensor [B], int32
        Tokens of each request that lie in the cache and that all its rows see.
    k_tree, v_tree : Tensor [B, S, Hk, D] and [B, S, Hk, Dv], or None
        Keys and values of the tree, dtype as `q`, S >= T. None: the tree's T tokens already lie in
        the cache at [cache_seqlens, cache_seqlens + T).
    tree_mask : Tensor or None
        Which tree keys a row sees, as `tree_attention` takes it; None is a causal chain.
    block_table : Tensor [B, max_pages], int32, optional
        Pages of each request in order; entries behind its last token are not read.
    window : int, optional
        Sliding window in tokens, the query's own included: a row at position t sees the keys at
        positions p with t - window < p <= t. A row's position is ``cache_seqlens`` plus its depth
        in the tree, so siblings share one.
    softmax_scale : float, optional
        Factor of the logits; D**-0.5 by default.
    softcap : float
        If positive, logits become ``softcap * tanh(logits / softcap)``.
    sinks : Tensor [Hq], optional
        A learned logit per head that joins the denominator and has no value (gpt-oss). `lse`
        includes it.
    cu_seqlens_q : Tensor [B + 1], int32, optional
        Makes queries ragged: request b owns the rows from ``cu_seqlens_q[b]`` to
        ``cu_seqlens_q[b + 1]``, or none; it begins with 0 and ends with the number of rows. `q` and
        `out` are then [tokens, Hq, D or Dv], `lse` [tokens, Hq], `k_tree` and `v_tree`
        [tokens, Hk, D or Dv] (each row has its own key) or None, and `tree_mask` is bool
        [tokens, max_seqlen_q] or packed int64 [tokens, W] with W = ceil(max_seqlen_q / 64), its
        columns counting the keys of a row's own request.
    max_seqlen_q : int, optional
        Rows that no request exceeds, needed with `cu_seqlens_q`. It bounds the launch.
    k_scale, v_scale : float or Tensor, optional
        What elements of a cache of 8 bits are multiplied with: one number, float32 [Hk], or one per
        token and head, float32 in the cache's layout without D; None is 1. Arithmetic says what 0,
        infinity and NaN do. The tree's own keys have none.
    cache_dtype : torch.dtype, optional
        What the bytes of a uint8 cache are.
    out : Tensor [B, T, Hq, Dv], optional
        Written in place and returned; dtype as `q`.
    lse : Tensor [B, T, Hq], optional
        Written in place and returned; float32.

    Returns
    -------
    out : Tensor [B, T, Hq, Dv]
        0 for a row that sees no key.
    lse : Tensor [B, T, Hq]
        Natural log of the sum of the exponentiated logits, sinks included; -inf for a row that
        sees nothing.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device, stride or value; the message names it.
    IndexError
        A length or a used page lies outside the cache, or `cu_seqlens_q` does not deal all rows,
        up to `max_seqlen_q` each. On a GPU only with ``SPECATTN_CHECK=1``, because looking would
        wait for the device.

    Examples
    --------
    Verify a tree of three tokens behind prefixes of 100 and 7 tokens:

    >>> import torch, specattn
    >>> tree = specattn.Tree([-1, 0, 0])
    >>> q, k_cache, v_cache = torch.randn(2, 3, 8, 64), *torch.randn(2, 2, 128, 2, 64)
    >>> k_tree, v_tree = torch.randn(2, 2, 3, 2, 64)
    >>> lengths = torch.tensor([100, 7], dtype=torch.int32)
    >>> out, lse = specattn.hybrid_tree_attention(
    ...     q, k_cache, v_cache, lengths, k_tree, v_tree, tree.mask
    ... )
    >>> out.shape, lse.shape
    (torch.Size([2, 3, 8, 64]), torch.Size([2, 3, 8]))

    One more row behind the first prefix, and a prefill of six rows for the second request:

    >>> rows = torch.tensor([0, 1, 7], dtype=torch.int32)
    >>> q, k, v = torch.randn(7, 8, 64), *torch.randn(2, 7, 2, 64)
    >>> out, lse = specattn.hybrid_tree_attention(
    ...     q, k_cache, v_cache, lengths, k, v, cu_seqlens_q=rows, max_seqlen_q=6
    ... )
    >>> out.shape, lse.shape
    (torch.Size([7, 8, 64]), torch.Size([7, 8]))

    Latents of 512 with rope keys of 64, cached once for all 16 heads:

    >>> q, latents = torch.randn(2, 1, 16, 576), torch.randn(2, 128, 1, 576)
    >>> new = torch.randn(2, 1, 1, 576)
    >>> out, lse = specattn.hybrid_tree_attention(
    ...     q, latents, latents[..., :512], lengths, new, new[..., :512], softmax_scale=192**-0.5
    ... )
    >>> out.shape
    torch.Size([2, 1, 16, 512])
    """
    k_cache, v_cache = cache_views(cache_dtype, k_cache=k_cache, v_cache=v_cache)
    tensors = (q, k_cache, v_cache, cache_seqlens, k_tree, v_tree, tree_mask, block_table, sinks)
    ragged = ragged_rows(cu_seqlens_q, max_seqlen_q)
    scales = scale_tensors(q, k_scale=k_scale, v_scale=v_scale)
    options = (window, softmax_scale, softcap)
    inputs, sizes = hybrid_inputs(_operator, *tensors, ragged, scales, out, lse, *options)
    out, lse = state_like(q, sizes["Dv"], out, lse)
    call(_operator, sizes, *inputs, out, lse)
    return out, lse


def hybrid_inputs(
    operator, q, k_cache, v_cache, cache_seqlens, k_tree, v_tree, tree_mask, block_table, sinks,
    ragged, scales, out, lse, window, softmax_scale, softcap,
) -> tuple[tuple[Any, ...], dict[str, int]]:  # fmt: skip
    """Check the arguments of a hybrid pass; return `operator`'s inputs, and the sizes.

    `ragged` is what `ragged_rows` returns, `scales` what `scale_tensors` does.
    """
    tree = {} if k_tree is None and v_tree is None else {"k_tree": k_tree, "v_tree": v_tree}
    sizes = check_tensors(
        q=q,
        **ragged,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        **scales,
        sinks=sinks,
        out=out,
        lse=lse,
        **tree,
        tree_mask=tree_mask,
    )
    window, softcap = number("window", window), number("softcap", softcap)
    softmax_scale = number("softmax_scale", softmax_scale)
    if window is not None and window > LARGEST:  # no text is so long
        window = None
    cu_seqlens_q, max_seqlen_q = ragged.get("cu_seqlens_q"), ragged.get("max_seqlen_q")
    trim = window is not None and not trims_masks(operator, q)
    if cu_seqlens_q is None:
        mask, depths = packed_mask(tree_mask, sizes, window, q.device, trim=trim)
    else:
        mask, depths = ragged_packed_mask(tree_mask, sizes, window, cu_seqlens_q, trim=trim)
    scale = sizes["D"] ** -0.5 if softmax_scale is None else softmax_scale
    inputs = (q, k_cache, v_cache, cache_seqlens, k_tree, v_tree, mask, depths)
    rows = (cu_seqlens_q, max_seqlen_q)
    return (
        *inputs,
        block_table,
        window,
        scale,
        softcap,
        sinks,
        *rows,
        *scale_inputs(scales, sizes),
    ), sizes


def cost(s: Sizes) -> Cost:
    """Count the tree as alone, and L cached keys and values that every row sees."""
    tree = tree_cost(s)
    return Cost(
        read=tree.read + s.keys_and_values(s.L) + 4 * s.indices,
        written=tree.written,
        operations=tree.operations + s.products(s.B * s.T * s.Hq * s.L),
    )
