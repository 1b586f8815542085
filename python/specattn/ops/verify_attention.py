"""Hybrid attention that also returns the prefix logits, or scores, of chosen rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._check import check_option
from ._library import STATE, call, define
from ._options import flag, integers
from ._outputs import output_like, state_like
from ._ragged import ragged_rows
from ._scales import cache_views, scale_tensors
from ._specs import COLLECTED
from .cost import Cost, Sizes
from .hybrid_tree_attention import HYBRID, hybrid_inputs
from .hybrid_tree_attention import cost as hybrid_cost

_operator = define(
    f"verify_attention({HYBRID}, str collect, int[] collect_rows, bool per_head, {STATE}, "
    "Tensor(c!) collected)"
)


def verify_attention(
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
    collect: str = "scores",
    collect_rows: Sequence[int] = (0, -1),
    per_head: bool = True,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    collected: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend as `hybrid_tree_attention` does and collect the prefix logits of some rows.

    Verification computes the logits that a sparse draft needs for choosing its keys; this pass
    returns them too (Vegas, arXiv 2602.07223, sections 3.2 and 3.3; the default rows
    are its Collect-2-Query).

    Parameters
    ----------
    q, k_cache, v_cache, cache_seqlens, k_tree, v_tree, tree_mask
        As in `hybrid_tree_attention`.
    block_table, window, softmax_scale, softcap, sinks, cu_seqlens_q, max_seqlen_q, out, lse
        As in `hybrid_tree_attention`.
    k_scale, v_scale, cache_dtype
        As in `hybrid_tree_attention`; what is collected are the logits of scaled keys.
    collect : {"scores", "logits"}
        "logits": each collected row's own logits. "scores": their mean over the collected rows and
        over the heads of each KV group, which is what `select_topk` takes; no logit is stored.
    collect_rows : sequence of int
        Rows to collect, at least one; negative ones count from the last. With `cu_seqlens_q` they
        count the rows of each request, and one that it does not have is its last, or its first if
        negative; a request without rows collects -inf.
    per_head : bool
        One score per KV head, or one over all heads; logits are always per query head.
    collected : Tensor, optional
        Where to write what is collected, of the shape and dtype below. It grows with the cache, so
        a caller that verifies again and again should give the same one: fresh memory of this size
        costs more than filling it.

    Returns
    -------
    out : Tensor [B, T, Hq, Dv]
    lse : Tensor [B, T, Hq]
        As `hybrid_tree_attention` returns them.
    collected : Tensor
        "logits": bfloat16 [B, R, Hq, N]; "scores": float32 [B, Hk, N], or [B, N] without
        `per_head`; N is the capacity of a request. Logits are scaled and capped, so
        ``exp(logit - lse)`` is the weight of a key. -inf where a collected row does not see it.

    Raises
    ------
    TypeError, ValueError, IndexError
        As `hybrid_tree_attention` does; ValueError also for a wrong `collect` or `collect_rows`.
        `collected` is held to shape, dtype and device like `out`.

    Examples
    --------
    >>> import torch, specattn
    >>> q, k_cache, v_cache = torch.randn(1, 4, 8, 64), *torch.randn(2, 1, 128, 2, 64)
    >>> k_tree, v_tree = torch.randn(2, 1, 4, 2, 64)
    >>> lengths = torch.tensor([100], dtype=torch.int32)
    >>> out, lse, scores = specattn.verify_attention(q, k_cache, v_cache, lengths, k_tree, v_tree)
    >>> indices, index_lengths = specattn.select_topk(scores, lengths, ratio=0.07)
    >>> indices.shape
    torch.Size([1, 2, 9])
    """
    k_cache, v_cache = cache_views(cache_dtype, k_cache=k_cache, v_cache=v_cache)
    tensors = (q, k_cache, v_cache, cache_seqlens, k_tree, v_tree, tree_mask, block_table, sinks)
    ragged = ragged_rows(cu_seqlens_q, max_seqlen_q)
    scales = scale_tensors(q, k_scale=k_scale, v_scale=v_scale)
    options = (window, softmax_scale, softcap)
    inputs, sizes = hybrid_inputs(_operator, *tensors, ragged, scales, out, lse, *options)
    check_option("collect", collect, collect in ("scores", "logits"), "'scores' or 'logits'")
    rows, per_head = integers("collect_rows", collect_rows), flag("per_head", per_head)
    valid = len(rows) > 0 and all(-sizes["T"] <= row < sizes["T"] for row in rows)
    check_option("collect_rows", rows, valid, f"at least one row, each below T={sizes['T']}")
    check_option("per_head", per_head, per_head or collect == "scores", "True for logits")
    out, lse = state_like(q, sizes["Dv"], out, lse)
    spec = COLLECTED[collect if per_head else "scores of all heads"]
    checked = sizes if collected is None else None
    collected = output_like(q, "collected", spec, sizes | {"R": len(rows)}, collected)
    call(_operator, checked, *inputs, collect, rows, per_head, out, lse, collected)
    return out, lse, collected


def cost_scores(s: Sizes) -> Cost:
    """Count hybrid attention and one more query row per KV head: the mean of the collected ones."""
    plain = hybrid_cost(s)
    return Cost(
        read=plain.read,
        written=plain.written + 4 * s.B * s.Hk * s.N,
        operations=plain.operations + 2 * s.B * s.Hk * s.L * s.D,
    )


def cost_logits(s: Sizes) -> Cost:
    """Count hybrid attention and the logits of the collected rows, written in bfloat16."""
    plain = hybrid_cost(s)
    collected = 2 * s.B * s.collected_rows * s.Hq * s.N
    return Cost(plain.read, plain.written + collected, plain.operations)
