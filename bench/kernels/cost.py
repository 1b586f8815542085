"""Which formula of bytes and operations a row of the sweep takes; each stands in its op's file."""

from __future__ import annotations

from collections.abc import Callable

from specattn.ops.cost import Cost, Sizes
from specattn.ops.hybrid_tree_attention import cost as hybrid
from specattn.ops.importance_scores import cost as importance
from specattn.ops.merge_state import cost as merge
from specattn.ops.select_topk import cost as select
from specattn.ops.sparse_gather_attention import cost as gather
from specattn.ops.tree_attention import cost as tree
from specattn.ops.verify_attention import cost_logits, cost_scores

FORMULAS: dict[str, Callable[[Sizes], Cost]] = {
    "tree_attention": tree,
    "merge_state": merge,
    "merge_states": merge,
    "hybrid_tree_attention": hybrid,
    "verify_attention/scores": cost_scores,
    "verify_attention/logits": cost_logits,
    "sparse_gather_attention": gather,
    "importance_scores": importance,
    "select_topk": select,
}
