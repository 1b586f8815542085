"""The bytes and operations that each primitive cannot do without.

One formula per primitive, over the symbols of the contract: B requests, T query rows, S keys of
the tree part, L cached keys read per request (K of them when they are gathered), N capacity, Hq
and Hk heads, D head_dim, e bytes per element. Every input is read once, every output written once;
an operation is one multiplication or one addition inside a dot product. Softmax is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The sizes a formula speaks of; zero for a part that a call does not have."""

    B: int
    T: int
    Hq: int
    Hk: int
    D: int
    e: int
    S: int = 0
    L: int = 0
    N: int = 0
    tree_pairs: int = 0  # (row, key) pairs that the tree mask lets through, of one request
    mask_words: int = 0  # int64 words of packed tree mask, over the whole batch
    indices: int = 0  # int32 values read: lengths, block table, positions, over the whole batch
    collected_rows: int = 0
    states: int = 0
    score_rows: int = 0  # rows of [.., N] scores of one request: Hk per head, 1 when shared
    selected: int = 0  # static K of a selection


@dataclass(frozen=True)
class Cost:
    """Bytes read, bytes written, operations."""

    read: int
    written: int
    operations: int

    @property
    def bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.read + self.written


def tree_attention(s: Sizes) -> Cost:
    read = _queries(s) + 2 * s.B * s.S * s.Hk * s.D * s.e + 8 * s.mask_words
    return Cost(read, _state(s), 4 * s.B * s.Hq * s.D * s.tree_pairs)


def merge_states(s: Sizes) -> Cost:
    return Cost(s.states * _state(s), _state(s), 2 * s.states * s.B * s.T * s.Hq * s.D)


def hybrid_tree_attention(s: Sizes) -> Cost:
    tree = tree_attention(s)
    prefix = 2 * s.B * s.L * s.Hk * s.D * s.e + 4 * s.indices
    return Cost(
        tree.read + prefix, tree.written, tree.operations + 4 * s.B * s.T * s.Hq * s.L * s.D
    )


def verify_scores(s: Sizes) -> Cost:
    """Mean logits need one more query row per KV head: the mean of the collected queries."""
    plain = hybrid_tree_attention(s)
    return Cost(
        plain.read,
        plain.written + 4 * s.B * s.Hk * s.N,
        plain.operations + 2 * s.B * s.Hk * s.L * s.D,
    )


def verify_logits(s: Sizes) -> Cost:
    plain = hybrid_tree_attention(s)
    return Cost(
        plain.read, plain.written + 2 * s.B * s.collected_rows * s.Hq * s.N, plain.operations
    )


def importance_scores(s: Sizes) -> Cost:
    """K is read once; the mean of scaled logits is the logit of the mean query."""
    return Cost(
        _queries(s) + s.B * s.L * s.Hk * s.D * s.e + 4 * s.indices,
        4 * s.B * s.score_rows * s.N,
        2 * s.B * s.Hk * s.L * s.D,
    )


def select_topk(s: Sizes) -> Cost:
    """Operations here are comparisons: each score is looked at once."""
    rows = s.B * s.score_rows
    return Cost(4 * rows * s.L + 4 * s.indices, 4 * rows * (s.selected + 1), rows * s.L)


FORMULAS: dict[str, Callable[[Sizes], Cost]] = {
    "tree_attention": tree_attention,
    "merge_state": merge_states,
    "merge_states": merge_states,
    "hybrid_tree_attention": hybrid_tree_attention,
    "verify_attention/scores": verify_scores,
    "verify_attention/logits": verify_logits,
    "sparse_gather_attention": hybrid_tree_attention,
    "importance_scores": importance_scores,
    "select_topk": select_topk,
}


def _queries(s: Sizes) -> int:
    return s.B * s.T * s.Hq * s.D * s.e


def _state(s: Sizes) -> int:
    """Return the bytes of one attention state: ``out`` in the input's type, ``lse`` in float32."""
    return s.B * s.T * s.Hq * (s.D * s.e + 4)
