"""GPU kernels in Triton, one function per primitive.

Each takes the arguments of the torch operator of its name and writes into the outputs, which come
last. Arguments are taken as they are: `specattn.ops` checks shapes, dtypes and devices, packs tree
masks and allocates.

Tested in Triton's interpreter and compiled offline for four architectures; compiled, not run on a
GPU.
"""

from .hybrid_tree_attention import hybrid_tree_attention
from .importance_scores import importance_scores
from .merge_state import merge_state
from .merge_states import merge_states
from .select_topk import select_topk
from .sparse_gather_attention import sparse_gather_attention
from .tree_attention import tree_attention
from .verify_attention import verify_attention

__all__ = [
    "hybrid_tree_attention",
    "importance_scores",
    "merge_state",
    "merge_states",
    "select_topk",
    "sparse_gather_attention",
    "tree_attention",
    "verify_attention",
]
