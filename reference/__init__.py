"""The specification: every primitive in plain PyTorch, for any float dtype.

All attention here is one formula over the keys j that a query row sees,

    a_j = cap(softmax_scale * q . k_j)            cap(x) = softcap * tanh(x / softcap), or x
    lse = log(exp(sink) + sum_j exp(a_j))         without a sink, the sum alone
    out = sum_j exp(a_j - lse) v_j                no key: out = 0; nor sink: lse = -inf

and the primitives differ in which keys those are: the nodes of a tree, a cached prefix, a list of
cached positions. `merge_state` joins results over disjoint keys. Softmax and sums run in float32,
in float64 for float64 inputs. Shapes use B requests, T query rows, S tree keys, N cache capacity,
Hq query heads, Hk KV heads, g = Hq / Hk and D head_dim.
"""

from .hybrid_tree_attention import hybrid_tree_attention
from .importance_scores import importance_scores
from .merge_state import merge_state
from .merge_states import merge_states
from .select_topk import select_topk
from .sparse_gather_attention import sparse_gather_attention
from .tree_attention import tree_attention
from .tree_mask import pack_tree_mask, tree_depths, trim_tree_mask, unpack_tree_mask
from .verify_attention import verify_attention

__all__ = [
    "hybrid_tree_attention",
    "importance_scores",
    "merge_state",
    "merge_states",
    "pack_tree_mask",
    "select_topk",
    "sparse_gather_attention",
    "tree_attention",
    "tree_depths",
    "trim_tree_mask",
    "unpack_tree_mask",
    "verify_attention",
]
