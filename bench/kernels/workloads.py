"""Turn a case into what is timed, what it is held against, and what it must move."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

import specattn
from specattn import reference

from . import peers
from .cases import MERGED, Case
from .cost import FORMULAS, Cost, Sizes
from .inputs import Draw, capacity, prefix

Outputs = dict[str, torch.Tensor]
KEEP = (4, 64)  # first and last tokens that a selection always takes


@dataclass(frozen=True)
class Workload:
    """What is timed, what it is held against, and what it must move.

    ``call`` is the public primitive; ``expected(dtype)`` the reference in a wider type;
    ``peers(wanted)`` who else does it, each answering with a part of the same outputs.
    """

    call: Callable[[], Outputs]
    expected: Callable[[torch.dtype], Outputs]
    cost: Cost
    peers: Callable[[tuple[str, ...]], dict[str, peers.Peer]]


def build(case: Case, draw: Draw) -> Workload:
    """Draw the tensors of ``case`` and bind them to its calls."""
    return _BUILDERS[case.op](case, draw)


def _tree_sizes(sizes: Sizes, mask: torch.Tensor | None) -> Sizes:
    """Add what a tree part of T keys costs; a missing mask is a causal chain."""
    if mask is None:
        return replace(sizes, S=sizes.T, tree_pairs=sizes.T * (sizes.T + 1) // 2)
    words = sizes.T * math.ceil(sizes.T / 64)
    return replace(sizes, S=sizes.T, tree_pairs=int(mask.sum()), mask_words=words)


def _packed(mask: torch.Tensor | None) -> torch.Tensor | None:
    return None if mask is None else reference.pack_tree_mask(mask)


def _wide(dtype: torch.dtype, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(dtype) for tensor in tensors]


def _state(pair: tuple[torch.Tensor, torch.Tensor]) -> Outputs:
    return dict(zip(("out", "lse"), pair, strict=True))


def _collected(triple: tuple[torch.Tensor, ...]) -> Outputs:
    return dict(zip(("out", "lse", "collected"), triple, strict=True))


def _tree_attention(case: Case, draw: Draw) -> Workload:
    q, k, v, mask = draw.queries(), draw.keys(case.rows), draw.keys(case.rows), draw.tree()
    packed = _packed(mask)
    return Workload(
        call=lambda: _state(specattn.tree_attention(q, k, v, packed)),
        expected=lambda dtype: _state(reference.tree_attention(*_wide(dtype, q, k, v), packed)),
        cost=FORMULAS[case.formula](_tree_sizes(draw.sizes, mask)),
        peers=partial(peers.attention, peers.Attention(q, lambda: (k, v), mask)),
    )


def _merge_state(case: Case, draw: Draw) -> Workload:
    s = draw.sizes
    outs = draw.normal(2, s.B, s.T, s.Hq, s.D)
    lses = draw.normal(2, s.B, s.T, s.Hq, dtype=torch.float32)
    state = outs[0], lses[0], outs[1], lses[1]
    return Workload(
        call=lambda: _state(specattn.merge_state(*state)),
        expected=lambda dtype: _state(reference.merge_state(*_wide(dtype, *state))),
        cost=FORMULAS[case.formula](replace(s, states=2)),
        peers=lambda wanted: peers.merge(outs, lses),
    )


def _merge_states(case: Case, draw: Draw) -> Workload:
    s = draw.sizes
    outs = draw.normal(MERGED, s.B, s.T, s.Hq, s.D)
    lses = draw.normal(MERGED, s.B, s.T, s.Hq, dtype=torch.float32)
    return Workload(
        call=lambda: _state(specattn.merge_states(outs, lses)),
        expected=lambda dtype: _state(reference.merge_states(*_wide(dtype, outs, lses))),
        cost=FORMULAS[case.formula](replace(s, states=MERGED)),
        peers=lambda wanted: peers.merge(outs, lses),
    )


def _hybrid(case: Case, draw: Draw) -> Workload:
    p, q, mask = prefix(case, draw), draw.queries(), draw.tree()
    packed = _packed(mask)
    options = {"tree_mask": packed, "block_table": p.block_table}
    first = "copy pages, " if case.page_size else ""
    task = peers.Attention(q, p.keys, mask, first=first, prefix=p)
    return Workload(
        call=lambda: _state(
            specattn.hybrid_tree_attention(
                q, p.k_cache, p.v_cache, p.lengths, p.k_tree, p.v_tree, **options
            )
        ),
        expected=lambda dtype: _state(
            reference.hybrid_tree_attention(
                *_wide(dtype, q, p.k_cache, p.v_cache),
                p.lengths,
                *_wide(dtype, p.k_tree, p.v_tree),
                **options,
            )
        ),
        cost=FORMULAS[case.formula](_tree_sizes(p.sizes, mask)),
        peers=partial(peers.attention, task),
    )


def _verify(case: Case, draw: Draw) -> Workload:
    p, q = prefix(case, draw), draw.queries()
    rows, task = (0, -1), peers.Attention(q, p.keys, None, prefix=p)
    options = {"collect": case.variant, "collect_rows": rows}
    sizes = replace(_tree_sizes(p.sizes, None), collected_rows=len(rows))
    arguments = (q, p.k_cache, p.v_cache, p.lengths, p.k_tree, p.v_tree)
    # As in a decode loop, what was collected before gives its memory to what is collected next.
    collected = specattn.verify_attention(*arguments, **options)[2]
    return Workload(
        call=lambda: _collected(
            specattn.verify_attention(*arguments, **options, collected=collected)
        ),
        expected=lambda dtype: _collected(
            reference.verify_attention(
                *_wide(dtype, q, p.k_cache, p.v_cache),
                p.lengths,
                *_wide(dtype, p.k_tree, p.v_tree),
                **options,
            )
        ),
        cost=FORMULAS[case.formula](sizes),
        peers=lambda wanted: peers.verify(task, wanted, case.variant, rows, p.sizes.N),
    )


def _sparse(case: Case, draw: Draw) -> Workload:
    p, q, mask = prefix(case, draw), draw.queries(), draw.tree()
    packed = _packed(mask)
    count = _chosen(case.context, case.sparsity)
    lists = case.shape.kv_heads if case.variant == "per head" else 1
    drawn = torch.rand(
        case.batch, lists, case.context, generator=draw.generator, device=draw.device
    )
    indices = drawn.topk(count).indices.sort().values.to(torch.int32)
    lengths = torch.full_like(indices[..., 0], count)
    if lists == 1:
        indices, lengths = indices[:, 0].contiguous(), lengths[:, 0].contiguous()
    sizes = replace(_tree_sizes(p.sizes, mask), L=count, indices=indices.numel() + lengths.numel())
    return Workload(
        call=lambda: _state(
            specattn.sparse_gather_attention(
                q, p.k_cache, p.v_cache, indices, lengths, p.k_tree, p.v_tree, packed
            )
        ),
        expected=lambda dtype: _state(
            reference.sparse_gather_attention(
                *_wide(dtype, q, p.k_cache, p.v_cache),
                indices,
                lengths,
                *_wide(dtype, p.k_tree, p.v_tree),
                tree_mask=packed,
            )
        ),
        cost=FORMULAS[case.formula](sizes),
        peers=partial(
            peers.attention, peers.Attention(q, peers.gathered(p, indices), mask, first="gather, ")
        ),
    )


def _importance(case: Case, draw: Draw) -> Workload:
    p, q = prefix(case, draw), draw.queries()
    sizes = replace(p.sizes, score_rows=p.sizes.Hk)
    return Workload(
        call=lambda: {"scores": specattn.importance_scores(q, p.k_cache, p.lengths)},
        expected=lambda dtype: {
            "scores": reference.importance_scores(*_wide(dtype, q, p.k_cache), p.lengths)
        },
        cost=FORMULAS[case.formula](sizes),
        peers=lambda wanted: peers.importance(q, p.k_cache, p.sizes.L),
    )


def _select(case: Case, draw: Draw) -> Workload:
    per_head = case.variant == "per head"
    width = capacity(case.context)
    shape = (case.batch, case.shape.kv_heads, width) if per_head else (case.batch, width)
    scores = draw.normal(*shape, dtype=torch.float32)
    scores[..., case.context :] = -math.inf
    lengths = draw.lengths(case.context)
    first, last = KEEP
    options = {"ratio": case.sparsity, "keep_first": first, "keep_last": last}
    names = ("indices", "index_lengths")
    count, selected = (_chosen(length, case.sparsity) for length in (case.context, width))

    def call() -> Outputs:
        return dict(zip(names, specattn.select_topk(scores, lengths, **options), strict=True))

    def expected(_: torch.dtype) -> Outputs:
        # Widening could not change an order, and the choice must be equal to the last index.
        return dict(zip(names, reference.select_topk(scores, lengths, **options), strict=True))

    sizes = replace(
        draw.sizes,
        L=case.context,
        N=width,
        indices=case.batch,
        score_rows=case.shape.kv_heads if per_head else 1,
        selected=selected,
    )
    return Workload(
        call=call,
        expected=expected,
        cost=FORMULAS[case.formula](sizes),
        peers=lambda wanted: peers.selection(scores, case.context, count, selected, KEEP),
    )


def _chosen(length: int, sparsity: float) -> int:
    """Return how many of ``length`` tokens the selection takes; 1e-6 guards against float noise."""
    return min(length, max(math.ceil(sparsity * length - 1e-6), sum(KEEP)))


_BUILDERS: dict[str, Callable[[Case, Draw], Workload]] = {
    "tree_attention": _tree_attention,
    "merge_state": _merge_state,
    "merge_states": _merge_states,
    "hybrid_tree_attention": _hybrid,
    "verify_attention": _verify,
    "sparse_gather_attention": _sparse,
    "importance_scores": _importance,
    "select_topk": _select,
}
OPS = tuple(_BUILDERS)
