"""The backend's operators with the reference's arguments; every output starts as garbage."""

import torch
from specattn.reference.select_topk import selection_size

from specattn import reference
from specattn.backends.cpu import BACKEND
from specattn.ops._tree_mask import ragged_packed_mask


def run(op, *args):
    """Call the kernel of an operator."""
    BACKEND.find(op)(*args)


def poisoned(*shape, dtype=torch.float32):
    """Return memory in which an element that nobody writes is seen."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -(2**30), dtype=dtype)


def _packed(mask):
    if mask is None or mask.dtype == torch.int64:
        return mask
    packed = reference.tree_mask.pack_tree_mask(mask)
    return packed if packed.dim() == 3 else packed[None]


def _scale(q, softmax_scale):
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _state(q, v):
    return poisoned(*q.shape[:-1], v.shape[-1], dtype=q.dtype), poisoned(*q.shape[:-1])


def _capacity(k_cache, block_table):
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _trimmed(q, cache, tree):
    """Pack the mask and trim it to the window, as `specattn.ops` does before it calls a kernel."""
    mask, window = tree.get("tree_mask"), tree.get("window")
    if tree.get("cu_seqlens_q") is not None:
        sizes = {"max_seqlen_q": tree["max_seqlen_q"]}
        mask, depths = ragged_packed_mask(mask, sizes, window, tree["cu_seqlens_q"])
        return {**cache, **tree, "tree_mask": mask, "depths": depths}
    depths = None
    if window is not None:
        size = q.shape[1] if tree.get("k_tree") is None else tree["k_tree"].shape[1]
        visible = reference.tree_mask.visible_tree_keys(mask, q.shape[1], size, q.device)
        depths = reference.tree_mask.tree_depths(visible)
        mask = reference.tree_mask.trim_tree_mask(visible, window)
    return {**cache, **tree, "tree_mask": _packed(mask), "depths": depths}


def _hybrid(q, cache, tree):
    args = _trimmed(q, cache, tree)
    return [
        q,
        *(args[name] for name in ("k_cache", "v_cache", "cache_seqlens")),
        *(args.get(n) for n in ("k_tree", "v_tree", "tree_mask", "depths", "block_table")),
        args.get("window"),
        _scale(q, args.get("softmax_scale")),
        args.get("softcap", 0.0),
        *(args.get(name) for name in ("sinks", "cu_seqlens_q", "max_seqlen_q")),
        *(args.get(name) for name in ("k_scale", "v_scale")),
    ]


def hybrid_tree_attention(q, *, k_cache, v_cache, cache_seqlens, block_table=None, **tree):
    cache = {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    state = _state(q, v_cache)
    args = _hybrid(q, {**cache, "block_table": block_table}, tree)
    run("hybrid_tree_attention", *args, *state)
    return state


def verify_attention(q, *, collect="scores", collect_rows=(0, -1), per_head=True, **options):
    cache = {n: options.pop(n) for n in ("k_cache", "v_cache", "cache_seqlens")}
    cache["block_table"] = options.pop("block_table", None)
    batch, capacity = (
        len(cache["cache_seqlens"]),
        _capacity(cache["k_cache"], cache["block_table"]),
    )
    if collect == "scores":
        heads = (cache["k_cache"].shape[2],) if per_head else ()
        collected = poisoned(batch, *heads, capacity)
    else:
        shape = (batch, len(collect_rows), q.shape[-2], capacity)
        collected = poisoned(*shape, dtype=torch.bfloat16)
    state = _state(q, cache["v_cache"])
    args = _hybrid(q, cache, options)
    run("verify_attention", *args, collect, list(collect_rows), per_head, *state, collected)
    return *state, collected


def tree_attention(q, k_new, v_new, tree_mask=None, softmax_scale=None, softcap=0.0):
    state = _state(q, v_new)
    scale = _scale(q, softmax_scale)
    run("tree_attention", q, k_new, v_new, _packed(tree_mask), scale, softcap, *state)
    return state


def sparse_gather_attention(
    q,
    k_cache,
    v_cache,
    indices,
    index_lengths,
    k_new=None,
    v_new=None,
    tree_mask=None,
    block_table=None,
    softmax_scale=None,
    softcap=0.0,
    sinks=None,
    cache_seqlens=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    k_scale=None,
    v_scale=None,
    per_row=False,
):
    state = _state(q, v_cache)
    if cu_seqlens_q is None:
        mask = _packed(tree_mask)
    else:
        mask, _ = ragged_packed_mask(tree_mask, {}, None, cu_seqlens_q)
    run(
        "sparse_gather_attention",
        q,
        k_cache,
        v_cache,
        indices,
        index_lengths,
        k_new,
        v_new,
        mask,
        block_table,
        _scale(q, softmax_scale),
        softcap,
        sinks,
        cache_seqlens,
        cu_seqlens_q,
        max_seqlen_q,
        k_scale,
        v_scale,
        per_row,
        *state,
    )
    return state


def importance_scores(q, k_cache, cache_seqlens, per_head=True, block_table=None, k_scale=None):
    heads = (k_cache.shape[2],) if per_head else ()
    scores = poisoned(q.shape[0], *heads, _capacity(k_cache, block_table))
    args = (q, k_cache, cache_seqlens, per_head, block_table, _scale(q, None), k_scale)
    run("importance_scores", *args, scores)
    return scores


def select_topk(
    scores, cache_seqlens, ratio=None, budget=None, min_tokens=0, keep_first=0, keep_last=0
):
    kept = keep_first + keep_last
    width = selection_size(scores.shape[-1], ratio, budget, min_tokens, kept)
    indices = poisoned(*scores.shape[:-1], width, dtype=torch.int32)
    counts = poisoned(*scores.shape[:-1], dtype=torch.int32)
    sizes = (ratio, budget, min_tokens, keep_first, keep_last)
    run("select_topk", scores, cache_seqlens, *sizes, indices, counts)
    return indices, counts


def merge_state(out_a, lse_a, out_b, lse_b):
    state = _state(out_a, out_a)
    run("merge_state", out_a, lse_a, out_b, lse_b, *state)
    return state


def merge_states(outs, lses):
    state = _state(outs[0], outs)
    run("merge_states", outs, lses, *state)
    return state


def linear_few_rows(x, weight, bias=None, up=None, activation=None, residual=None, *codes):
    """`codes` are the scale and zero of `weight`, and of `up`."""
    codes = (*codes, None, None, None, None)[:4]
    out = poisoned(len(x), len(weight), dtype=x.dtype)
    run("linear_few_rows", x, weight, bias, up, activation, residual, *codes, out)
    return out


def _rows_and_parents(a):
    parents = a["parents"]
    if parents is not None and "cu_seqlens_q" not in a and parents.dim() == 1:
        parents = parents[None]
    return parents, a.get("cu_seqlens_q"), a.get("max_seqlen_q")


def gated_delta_tree(q, k, v, g, beta, state, query_scale=None, l2_norm=False, **tree):
    parents, *rows = _rows_and_parents(tree)
    width = state.shape[2] + state.shape[3] + (state.shape[2] if g.dim() == v.dim() else 1)
    out, stash = poisoned(*v.shape, dtype=q.dtype), poisoned(*v.shape[:-1], width)
    options = (_scale(q, query_scale), l2_norm, *rows)
    run("gated_delta_tree", q, k, v, g, beta, state, parents, *options, out, stash)
    return out, stash


def gated_delta_commit(state, stash, nodes, counts, cu_seqlens_q=None, max_seqlen_q=None):
    run("gated_delta_commit", state, stash, nodes, counts, cu_seqlens_q, max_seqlen_q)


def causal_conv_tree(x, weight, bias, conv_state, activation=None, **tree):
    parents, *rows = _rows_and_parents(tree)
    out = poisoned(*x.shape, dtype=x.dtype)
    run("causal_conv_tree", x, weight, bias, conv_state, parents, activation, *rows, out)
    return out


def causal_conv_commit(conv_state, x, nodes, counts, cu_seqlens_q=None, max_seqlen_q=None):
    run("causal_conv_commit", conv_state, x, nodes, counts, cu_seqlens_q, max_seqlen_q)
