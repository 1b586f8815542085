"""The public primitives: checks, documentation, torch operators and the choice of backend.

They are for inference: no gradient flows through them, and a call that would have to record one is
refused; `torch.no_grad()` says that none is wanted. No call waits for the device; with `out` and
`lse` given, none allocates more than its workspace.
"""

from .add_gumbel_noise import add_gumbel_noise
from .causal_conv_commit import causal_conv_commit
from .causal_conv_tree import causal_conv_tree
from .gated_delta_commit import gated_delta_commit
from .gated_delta_tree import gated_delta_tree
from .hybrid_tree_attention import hybrid_tree_attention
from .importance_scores import importance_scores
from .layouts import lse_from_log2, lse_heads_first, lse_heads_last, lse_to_log2
from .linear_few_rows import linear_few_rows
from .merge_state import merge_state
from .merge_states import merge_states
from .select_topk import select_topk
from .sparse_gather_attention import sparse_gather_attention
from .tree_attention import tree_attention
from .verify_attention import verify_attention
from .write_kv import write_kv

__all__ = [
    "add_gumbel_noise",
    "causal_conv_commit",
    "causal_conv_tree",
    "gated_delta_commit",
    "gated_delta_tree",
    "hybrid_tree_attention",
    "importance_scores",
    "linear_few_rows",
    "lse_from_log2",
    "lse_heads_first",
    "lse_heads_last",
    "lse_to_log2",
    "merge_state",
    "merge_states",
    "select_topk",
    "sparse_gather_attention",
    "tree_attention",
    "verify_attention",
    "write_kv",
]
