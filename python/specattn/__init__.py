"""Attention primitives for speculative decoding over long contexts, and what they make possible.

The primitives and their contract: `specattn.ops`. Their meaning: `specattn.reference`. Trees of
drafted tokens: `specattn.Tree`. Which of them survive: `specattn.acceptance`. Decoding Hugging Face
models: `specattn.decoding`, imported on its own because it needs transformers.
"""

from . import acceptance
from .backends import backends, use_backend
from .ops import (
    hybrid_tree_attention,
    importance_scores,
    merge_state,
    merge_states,
    select_topk,
    sparse_gather_attention,
    tree_attention,
    verify_attention,
)
from .tree import Tree

__version__ = "0.1.0"

__all__ = [
    "Tree",
    "acceptance",
    "backends",
    "hybrid_tree_attention",
    "importance_scores",
    "merge_state",
    "merge_states",
    "select_topk",
    "sparse_gather_attention",
    "tree_attention",
    "use_backend",
    "verify_attention",
]
