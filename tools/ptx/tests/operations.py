"""What each operation of a `Case` calls, and the results that it is to have."""

import torch
from tests import gumbel
from tests.cases import dense_attention, expected

import specattn
from specattn import reference

from . import ragged, writes
from .case import far
from .types import DTYPES


def _state(oracle, dtype):
    """Return the expectations of an attention state; ``oracle`` maps a dtype to (out, lse)."""
    exact = oracle(torch.float64)
    # PyTorch keeps the log-sum-exp in float32 whatever the dtype.
    return [
        (exact[0], oracle(dtype)[0], 1e-6),
        (exact[1], oracle(torch.float32)[1], 2e-6),
    ]


def _attention(case, **options):
    return _state(lambda dtype: expected(case.problem.to(dtype), **options), DTYPES[case.dtype])


def _hybrid(case):
    p, _ = case.given
    return lambda: specattn.hybrid_tree_attention(
        p.q,
        cache_seqlens=p.cache_seqlens,
        **case.cache,
        **case.tree_tensors,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sink_logits,
        out=far(torch.full_like(p.q, torch.nan), 1) if case.far == "rows" else None,
    )


def _expect_hybrid(case):
    return _attention(case, window=case.window, softcap=case.softcap, sinks=case.sink_logits)


def _tree(case):
    p = case.problem
    return lambda: specattn.tree_attention(
        p.q, p.k_tree, p.v_tree, p.tree_mask, softcap=case.softcap
    )


def _expect_tree(case):
    return _attention(case, prefix=False, softcap=case.softcap)


def _verify(case):
    p, collect = case.given[0], case.op
    return lambda: specattn.verify_attention(
        p.q,
        cache_seqlens=p.cache_seqlens,
        **case.cache,
        **case.tree_tensors,
        **_verify_options(case),
        collect=collect,
    )


def _verify_options(case):
    options = {"window": case.window, "softcap": case.softcap, "collect_rows": (0, -1)}
    return options | ({"per_head": case.per_head} if case.op == "scores" else {})


def _expect_verify(case):
    def collected(dtype):
        x = case.problem.to(dtype)
        tensors = x.cache(False) | {
            "k_tree": x.k_tree,
            "v_tree": x.v_tree,
            "tree_mask": x.tree_mask,
        }
        return reference.verify_attention(
            x.q, cache_seqlens=x.cache_seqlens, collect=case.op, **tensors, **_verify_options(case)
        )[2]

    exact = collected(torch.float64)
    # Logits are rounded once.
    last = (exact.bfloat16(), 1e-6) if case.op == "logits" else (collected(torch.float32), 2e-6)
    state = _attention(case, window=case.window, softcap=case.softcap)
    return [*state, (exact, *last)]


def _selection(case):
    """Return (which cached tokens are chosen [B, Hk or T, N], their indices, how many)."""
    generator = torch.Generator().manual_seed(1)
    (_, capacity, heads), p = case.problem.k_cache.shape[:3], case.problem
    live = torch.arange(capacity) < p.cache_seqlens[:, None, None]
    shape = (len(case.lengths), case.rows if case.per_row else heads, capacity)
    chosen = live & (torch.rand(shape, generator=generator) < 0.6)
    never_read = 2**30
    indices = torch.where(chosen, torch.arange(capacity), never_read).sort(-1).values.int()
    return chosen, indices, chosen.sum(-1).int()


def _gather(case):
    p, (_, indices, lengths) = case.given[0], _selection(case)
    names = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask}
    tree = names if case.tree != "none" else {}
    return lambda: specattn.sparse_gather_attention(
        p.q,
        indices=indices,
        index_lengths=lengths,
        **tree,
        **case.cache,
        sinks=case.sink_logits,
        per_row=case.per_row,
    )


def _expect_gather(case):
    chosen, with_tree = _selection(case)[0], case.tree != "none"

    def head_state(x, head):
        h = slice(head * case.group, (head + 1) * case.group)
        k = torch.cat([x.k_cache, x.k_tree], 1)[:, :, head : head + 1]
        v = torch.cat([x.v_cache, x.v_tree], 1)[:, :, head : head + 1]
        in_prefix = chosen
        if not case.per_row:
            in_prefix = chosen[:, head, None].expand(-1, case.rows, -1)
        visible = torch.cat([in_prefix, x.tree_mask & with_tree], -1)
        sinks = case.sink_logits[h].to(x.q.dtype) if case.sinks else None
        return dense_attention(x.q[:, :, h], k, v, visible, sinks=sinks)

    def oracle(dtype):
        x = case.problem.to(dtype)
        states = [head_state(x, head) for head in range(case.kv_heads)]
        return [torch.cat(parts, 2) for parts in zip(*states, strict=True)]

    return _state(oracle, DTYPES[case.dtype])


def _importance_arguments(case, dtype=None):
    p = case.given[0] if dtype is None else case.problem.to(dtype)
    tensors = case.cache if dtype is None else p.cache()
    tensors = {name: x for name, x in tensors.items() if name not in ("v_cache", "v_scale")}
    return tensors | {"q": p.q, "cache_seqlens": p.cache_seqlens, "per_head": case.per_head}


def _importance(case):
    return lambda: (specattn.importance_scores(**_importance_arguments(case)),)


def _expect_importance(case):
    exact, by_torch = (
        reference.importance_scores(**_importance_arguments(case, dtype))
        for dtype in (torch.float64, torch.float32)
    )
    return [(exact, by_torch, 2e-6)]


def _scores_to_select(case):
    generator = torch.Generator().manual_seed(2)
    shape = (len(case.lengths), case.kv_heads, max(case.lengths) + 3)
    return torch.randint(-20, 20, shape, generator=generator).float()  # with ties


def _select_options():
    return {"ratio": 0.3, "min_tokens": 5, "keep_first": 2, "keep_last": 3}


def _select(case):
    scores, lengths = _scores_to_select(case), case.problem.cache_seqlens
    return lambda: specattn.select_topk(scores, lengths, **_select_options())


def _expect_select(case):
    lengths = case.problem.cache_seqlens
    exact = reference.select_topk(_scores_to_select(case), lengths, **_select_options())
    return [(x.double(), x, 0.0) for x in exact]  # equality


def _states(case):
    """Return five stacked states, some of them empty with NaN as output."""
    generator = torch.Generator().manual_seed(3)
    shape = (5, len(case.lengths), case.rows, case.group * case.kv_heads)
    outs = torch.randn(*shape, case.head_dim, generator=generator).to(DTYPES[case.dtype])
    lses = torch.randn(shape, generator=generator) * 8
    lses = lses.masked_fill(torch.rand(shape, generator=generator) < 0.4, -torch.inf)
    return outs.masked_fill(lses.isinf()[..., None], torch.nan), lses


def _merge(case):
    outs, lses = _states(case)
    if case.op == "merge_states":
        return lambda: specattn.merge_states(outs, lses)
    return lambda: specattn.merge_state(
        outs[0].clone(), lses[0].clone(), outs[1].clone(), lses[1].clone()
    )


def _expect_merge(case):
    outs, lses = (x if case.op == "merge_states" else x[:2] for x in _states(case))
    exact = reference.merge_states(outs.double(), lses.double())
    return list(zip(exact, reference.merge_states(outs, lses), (1e-6, 2e-6), strict=True))


def _gumbel_arguments(case, dtype):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(case.rows, 1500, generator=generator).to(DTYPES[case.dtype])
    requests, positions = torch.arange(case.rows), torch.arange(case.rows) + case.rows
    return logits.to(dtype), 2**40 + 3, requests, positions


def _gumbel(case):
    return lambda: (specattn.add_gumbel_noise(*_gumbel_arguments(case, DTYPES[case.dtype])),)


def _expect_gumbel(case):
    exact, by_torch = (
        reference.add_gumbel_noise(*_gumbel_arguments(case, dtype))
        for dtype in (torch.float64, torch.float32)
    )
    return [(exact, by_torch, gumbel.TOLERANCE)]


OPERATIONS = {
    "hybrid": (_hybrid, _expect_hybrid),
    "tree": (_tree, _expect_tree),
    "scores": (_verify, _expect_verify),
    "logits": (_verify, _expect_verify),
    "gather": (_gather, _expect_gather),
    "importance": (_importance, _expect_importance),
    "select": (_select, _expect_select),
    "gumbel": (_gumbel, _expect_gumbel),
    "merge_state": (_merge, _expect_merge),
    "merge_states": (_merge, _expect_merge),
    "write": (writes.call_of, writes.expect),
}
for _name in ragged.NAMES:
    OPERATIONS[_name] = (
        lambda case: ragged.call_of(case, DTYPES[case.dtype]),
        lambda case: ragged.expect(case, DTYPES[case.dtype]),
    )
