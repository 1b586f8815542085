"""Launches the attention family for a primitive: the split-KV kernel, then the combine."""

import torch
import triton

from .. import gpu_record
from . import _configs, _trial
from ._combine import combine, partial_states
from ._eight_bits import FORMS, bytes_of, scale_strides
from ._launch import collected_strides, early, launch, strides
from ._split_kv import split_kv_kernel


def not_served(q, k, v, *others):
    """Return why the kernel does not take a call, or None."""
    if q.dtype == torch.float32 and max(q.shape[-1], v.shape[-1]) > 256:
        return f"keys of {q.shape[-1]} and values of {v.shape[-1]} in float32"
    return None


def _in_keys(k, v):
    """Return whether values are what their keys begin with; missing ones are."""
    if k is None:
        return True
    return v.data_ptr() == k.data_ptr() and strides(v)[:3] == strides(k)[:3]


def _in_pairs(*caches):
    """Return whether two elements of 8 bits that lie side by side can be loaded as one of 16."""
    return all(x.data_ptr() % 2 == 0 and not any(s % 2 for s in strides(x)[:3]) for x in caches)


def attend(
    q,
    k_cache,
    v_cache,
    lengths,
    out,
    lse,
    *,
    softmax_scale,
    softcap=0.0,
    tree=True,
    k_tree=None,
    v_tree=None,
    tree_mask=None,
    depths=None,
    block_table=None,
    indices=None,
    window=None,
    sinks=None,
    collect="none",
    collect_rows=(),
    collected=None,
    cache_seqlens=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    k_scale=None,
    v_scale=None,
    per_row=False,
):
    """Launch the split-KV kernel for one primitive, and the combine where it is needed.

    Parameters
    ----------
    k_cache, v_cache, lengths
        The prefix and how many keys of it count, [B, 1 or Hk], or ``per_row`` [B, T]: cached
        tokens, or with ``indices`` selected ones. ``None`` where there is only a tree.
    tree, k_tree, v_tree
        Whether there is a tree, and its keys [B, S, Hk, D]; without these they are the ``T`` cache
        entries behind the prefix.
    indices
        Selected positions [B, 1 or Hk, K], or ``per_row`` [B, T, K].
    collected
        [B, R, Hq, N] for ``collect="logits"``, [B, Hk, N] for "scores"; N the cache's capacity.
    cache_seqlens
        [B]: with it a length of -1 stands for that many cached keys, whatever ``indices`` say.
    cu_seqlens_q, max_seqlen_q
        [B + 1]: where each request's rows begin and end, at most so many. Then ``q``, ``out`` and
        ``lse``, the tree's keys, mask and depths and lists ``per_row`` have rows [tokens] instead
        of [B, T].
    k_scale, v_scale
        Of a cache of 8 bits: [Hk], or [outer, inner, Hk] as the cache.
    """
    if cu_seqlens_q is not None:
        rows = (q, out, lse, k_tree, v_tree, tree_mask, depths)
        q, out, lse, k_tree, v_tree, tree_mask, depths = (x if x is None else x[None] for x in rows)
        if per_row:
            lengths, indices = lengths[None], indices[None]
    batches, tokens, heads, D = q.shape
    v_dim = out.shape[-1]
    B, T = batches, tokens
    if cu_seqlens_q is not None:
        B, T = cu_seqlens_q.shape[0] - 1, max_seqlen_q
    prefix = k_cache is not None
    kv_heads = (k_cache if prefix else k_tree).shape[2]
    group = heads // kv_heads
    form = FORMS.get(k_cache.dtype, "") if prefix else ""
    page_size = k_cache.shape[1] if block_table is not None else 0
    capacity = 0
    if prefix and (indices is None or cache_seqlens is not None):
        capacity = block_table.shape[1] * page_size if page_size else k_cache.shape[1]
    if indices is not None:
        capacity = max(capacity, indices.shape[2])
    span = capacity if window is None or collected is not None else min(window, capacity)
    if tree and prefix and indices is None and not form and v_dim == D:
        dtype = gpu_record.DTYPES.get(q.dtype, "")
        shape = gpu_record.Shape("hybrid_tree_attention", dtype, D, T * group, span, B)
        plain = window is None and softcap == 0 and collect == "none"
        hopper = _configs.hopper_config(q, shape, kv_heads, page_size, collect=collect, plain=plain)
        if hopper:
            from ._hopper import attend_on_hopper, serves  # needs Gluon

            call = {
                "softmax_scale": softmax_scale, "softcap": softcap, "k_tree": k_tree,
                "v_tree": v_tree, "tree_mask": tree_mask, "depths": depths,
                "block_table": block_table, "window": window, "sinks": sinks, "collect": collect,
                "collect_rows": collect_rows, "cu_seqlens_q": cu_seqlens_q,
                "max_seqlen_q": max_seqlen_q,
            }  # fmt: skip

            def on_hopper(out, lse, collected):
                given = call | {"collected": collected}
                attend_on_hopper(hopper, q, k_cache, v_cache, lengths, out, lse, **given)

            def split(out, lse, collected):
                given = call | {"collected": collected}
                with _configs.forced(hopper=False):
                    attend(q, k_cache, v_cache, lengths, out, lse, **given)

            if serves(hopper, q, k_cache, v_cache, out, call):
                kernel = "Gluon kernel", hopper[:6], D, q.dtype, collect, page_size > 0
                results = out, lse, collected
                if _trial.passes(kernel, results, on_hopper, split):
                    on_hopper(*results)
                    return
    if form:
        k_cache, v_cache = bytes_of(k_cache), bytes_of(v_cache)
    lookups = (block_table is not None) + (indices is not None)
    v_in_k = not form and _in_keys(k_cache, v_cache) and _in_keys(k_tree, v_tree)
    widths = _configs.widths_of(D, v_dim, v_in_k, in_registers=q.dtype == torch.float32)
    rows = group if per_row else T * group
    pairs = form and _in_pairs(k_cache, v_cache) and softcap == 0 and collect == "none"
    config = _configs.attention_config(
        q.device, q.dtype, rows, widths, lookups, form != "", collect == "logits", bool(pairs)
    )
    padded = triton.cdiv(group, config.block_m) * config.block_m if per_row else group
    tiles = triton.cdiv(T * padded, config.block_m)
    requests, num_requests = B, None
    if cu_seqlens_q is not None:
        num_requests = B
        if collect != "logits":
            tiles, requests = tokens * padded // config.block_m + B, 1
    programs = kv_heads * min(requests * tiles, triton.cdiv(B * T * padded, config.block_m))
    state_bytes = 4 * batches * tokens * heads * (v_dim + 1)
    splits = _configs.splits(q.device, config, rows, programs, span, state_bytes, alone=B == 1)
    slots = splits.slots
    states, state_lses = partial_states(slots, out, lse)
    block_c = group
    if collect == "logits":
        block_c = max(16, triton.cdiv(len(collect_rows) * group, tiles))
    cache_strides = strides(k_cache)[:3] + strides(v_cache)[:3] if prefix else (0,) * 6
    has_tree_keys = k_tree is not None
    tree_strides = strides(k_tree)[:3] + strides(v_tree)[:3] if has_tree_keys else cache_strides
    # K and V nearly always lie alike: then one set of addresses serves both.
    alike = cache_strides[:3] == cache_strides[3:] and tree_strides[:3] == tree_strides[3:]
    masked = tree_mask is not None
    kind = "mask" if tree else "none"
    if tree and not masked and T > _configs.DRAFTED:
        kind = "chain"
    elif tree and not masked:  # a short chain runs the same kernel, and needs a pointer for it
        tree_mask = torch.empty((1, 1, 1), dtype=torch.int64, device=q.device)
    tree_stages = None
    if kind == "chain" or (window is not None and depths is None):
        # The tree's keys are looked up only where they lie in the cache.
        tree_stages = _configs.stages(config, lookups, 0 if has_tree_keys else lookups)
    if form and config.block_m >= 64 and _configs.UNFENCED:
        tree_stages = 1  # copies of the tree's own keys are not fenced there
    launch(
        split_kv_kernel, (kv_heads * tiles, slots, requests),
        q, k_cache, v_cache, lengths, indices, block_table, k_tree, v_tree, tree_mask, depths,
        cu_seqlens_q, cache_seqlens, sinks, k_scale, v_scale, states, state_lses, collected,
        softmax_scale, softcap, int(masked), T, k_tree.shape[1] if has_tree_keys else T,
        capacity, splits.wanted, splits.least, splits.most, window or 0, kv_heads, num_requests,
        *strides(q)[:3],
        *cache_strides,
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        *(strides(lengths) if prefix else (0, 0)),
        *(strides(indices)[:2] if indices is not None else (0, 0)),
        block_table.stride(0) if page_size else 0,
        *tree_strides,
        *(strides(tree_mask)[:2] if tree_mask is not None else (0, 0)),
        strides(depths)[0] if depths is not None else 0,
        cache_seqlens.stride(0) if cache_seqlens is not None else None,
        *strides(states)[:4],
        *strides(state_lses),
        *collected_strides(collected),
        WIDTHS=tuple(widths),
        GROUP=group,
        PER_ROW=per_row,
        PADDED=padded,
        PREFIX=prefix,
        TREE=kind,
        PAGE_SIZE=page_size,
        ALIKE=alike,
        FORM=form,
        NATIVE=_configs.converts_e4m3(q.device),
        PAIRS=config.pairs,
        PTX=_configs.runs_ptx(q.device),
        WINDOW=window is not None,
        SOFTCAP=softcap > 0,
        COLLECT=collect,
        COLLECT_ROWS=tuple(collect_rows),
        TREE_STAGES=tree_stages,
        BLOCK_C=triton.next_power_of_2(block_c),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **config.options,
        **early(q.device),
    )  # fmt: skip
    if slots > 1:
        combine(
            states,
            state_lses,
            out,
            lse,
            lengths=lengths,
            splits=splits,
            span=span,
            unit=config.block_n,
            cache_seqlens=cache_seqlens,
            cu_seqlens_q=cu_seqlens_q,
            per_row=per_row,
        )
