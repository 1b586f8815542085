"""One valid call of every primitive, for the tests that hold for all of them."""

import specattn
import torch
from specattn.reference import pack_tree_mask

from tests.cases import make_problem


def valid_calls(p=None, paged=False):
    """Return `{name: (function, keyword arguments)}` on problem `p`, packed mask, no outputs."""
    p = p or make_problem(page_size=4)
    state = torch.randn_like(p.q), torch.randn(p.q.shape[:-1])
    other = torch.randn_like(p.q), torch.randn(p.q.shape[:-1])
    mask = pack_tree_mask(p.tree_mask)
    cache = p.cache(paged)
    keys = {name: x for name, x in cache.items() if name != "v_cache"}
    capacity = p.k_cache.shape[1]
    hybrid = {"q": p.q, **cache, "cache_seqlens": p.cache_seqlens}
    hybrid |= {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": mask}
    indices = torch.arange(3, dtype=torch.int32).repeat(len(p.q), 1)
    sparse = {"q": p.q, **cache, "indices": indices, "k_new": p.k_tree, "v_new": p.v_tree}
    sparse |= {"index_lengths": p.cache_seqlens.clamp(max=3), "tree_mask": mask}
    return {
        "tree_attention": (
            specattn.tree_attention,
            {"q": p.q, "k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": mask},
        ),
        "merge_state": (
            specattn.merge_state,
            dict(zip(("out_a", "lse_a", "out_b", "lse_b"), state + other, strict=True)),
        ),
        "merge_states": (
            specattn.merge_states,
            {"outs": torch.stack([state[0], other[0]]), "lses": torch.stack([state[1], other[1]])},
        ),
        "hybrid_tree_attention": (specattn.hybrid_tree_attention, hybrid),
        "verify_attention": (specattn.verify_attention, hybrid),
        "sparse_gather_attention": (specattn.sparse_gather_attention, sparse),
        "importance_scores": (
            specattn.importance_scores,
            {"q": p.q, **keys, "cache_seqlens": p.cache_seqlens},
        ),
        "select_topk": (
            specattn.select_topk,
            {
                "scores": torch.randn(len(p.q), 2, capacity),
                "cache_seqlens": p.cache_seqlens,
                "ratio": 0.3,
            },
        ),
    }


NAMES = tuple(valid_calls())
WITH_STATE = tuple(name for name in NAMES if name not in ("importance_scores", "select_topk"))
