"""The C++ kernels as a backend: one function per torch operator, outputs written in place."""

from __future__ import annotations

import torch

from specattn import _cpu  # type: ignore[attr-defined]  # compiled: no source for mypy

_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int32: 3,
    torch.int64: 4,
}
_threads = torch.get_num_threads


def _view(x: torch.Tensor | None) -> tuple | None:
    """Return what the extension knows of a tensor: address, shape, strides and type."""
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), _DTYPES[x.dtype])


def _sinks(sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sinks in float32; the caller holds on to what was converted."""
    return None if sinks is None else sinks.detach().to(torch.float32).contiguous()


def tree_attention(q, k_new, v_new, tree_mask, softmax_scale, softcap, out, lse):
    """Attend to the tree's keys alone."""
    _cpu.attention(
        _view(q),
        None,
        None,
        None,
        _view(k_new),
        _view(v_new),
        _view(tree_mask),
        None,
        None,
        0,
        softmax_scale,
        softcap,
        None,
        _view(out),
        _view(lse),
        "",
        (),
        None,
        _threads(),
    )


def hybrid_tree_attention(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    k_tree,
    v_tree,
    tree_mask,
    depths,
    block_table,
    window,
    softmax_scale,
    softcap,
    sinks,
    out,
    lse,
):
    """Attend to the cached prefix and to the tree."""
    verify_attention(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        k_tree,
        v_tree,
        tree_mask,
        depths,
        block_table,
        window,
        softmax_scale,
        softcap,
        sinks,
        "",
        (),
        out,
        lse,
        None,
    )


def verify_attention(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    k_tree,
    v_tree,
    tree_mask,
    depths,
    block_table,
    window,
    softmax_scale,
    softcap,
    sinks,
    collect,
    collect_rows,
    out,
    lse,
    collected,
):
    """Attend to the cached prefix and to the tree, and hand out logits or scores of the prefix."""
    sinks = _sinks(sinks)
    _cpu.attention(
        _view(q),
        _view(k_cache),
        _view(v_cache),
        _view(cache_seqlens),
        _view(k_tree),
        _view(v_tree),
        _view(tree_mask),
        _view(depths),
        _view(block_table),
        window or 0,
        softmax_scale,
        softcap,
        _view(sinks),
        _view(out),
        _view(lse),
        collect,
        collect_rows,
        _view(collected),
        _threads(),
    )


def sparse_gather_attention(
    q,
    k_cache,
    v_cache,
    indices,
    index_lengths,
    k_new,
    v_new,
    tree_mask,
    block_table,
    softmax_scale,
    softcap,
    sinks,
    out,
    lse,
):
    """Attend to the cached tokens at `indices`, and to the tree where one is given."""
    sinks = _sinks(sinks)
    _cpu.sparse_gather_attention(
        _view(q),
        _view(k_cache),
        _view(v_cache),
        _view(indices),
        _view(index_lengths),
        _view(k_new),
        _view(v_new),
        _view(tree_mask),
        _view(block_table),
        softmax_scale,
        softcap,
        _view(sinks),
        _view(out),
        _view(lse),
        _threads(),
    )


def importance_scores(q, k_cache, cache_seqlens, per_head, block_table, softmax_scale, scores):
    """Score every cached key by its mean logit."""
    _cpu.importance_scores(
        _view(q),
        _view(k_cache),
        _view(cache_seqlens),
        per_head,
        _view(block_table),
        softmax_scale,
        _view(scores),
        _threads(),
    )


def select_topk(
    scores,
    cache_seqlens,
    ratio,
    budget,
    min_tokens,
    keep_first,
    keep_last,
    indices,
    index_lengths,
):
    """Select the positions of the greatest scores, in ascending order."""
    _cpu.select_topk(
        _view(scores),
        _view(cache_seqlens),
        ratio,
        budget,
        min_tokens,
        keep_first,
        keep_last,
        _view(indices),
        _view(index_lengths),
        _threads(),
    )


def merge_state(out_a, lse_a, out_b, lse_b, out, lse):
    """Merge two attention states."""
    _cpu.merge_state(
        _view(out_a),
        _view(lse_a),
        _view(out_b),
        _view(lse_b),
        _view(out),
        _view(lse),
        _threads(),
    )


def merge_states(outs, lses, out, lse):
    """Merge any number of attention states."""
    _cpu.merge_states(_view(outs), _view(lses), _view(out), _view(lse), _threads())
