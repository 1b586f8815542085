"""Gathered attention in C++ against what PyTorch makes of copied keys."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import assert_accurate, dense_attention, make_problem, problems
from tests.cpu import calls

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LUCK = 5e-7  # what one product or exp may be off where PyTorch happens to be exact
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_lists(problem, size, per_head, seed):
    """Return up to `size` positions per request or head, in any order, and how many there are."""
    generator = torch.Generator().manual_seed(seed)
    heads = (problem.k_cache.shape[2],) if per_head else ()
    indices = torch.full((len(problem.q), *heads, size), -(2**30), dtype=torch.int32)
    lengths = torch.zeros(indices.shape[:-1], dtype=torch.int32)
    for place in torch.ones(lengths.shape).nonzero().tolist():
        cached = int(problem.cache_seqlens[place[0]])
        count = int(torch.randint(0, min(size, cached) + 1, (), generator=generator))
        indices[tuple(place)][:count] = torch.randperm(cached, generator=generator)[:count].int()
        lengths[tuple(place)] = count
    return indices, lengths


def eager(p, indices, lengths, with_tree, **options):
    """Return what PyTorch makes of one KV head after the other, its keys copied together."""
    lists = indices if indices.dim() == 3 else indices[:, None].expand(-1, p.k_cache.shape[2], -1)
    counts = lengths if lengths.dim() == 2 else lengths[:, None].expand(lists.shape[:2])
    sinks, heads, results = options.pop("sinks"), p.k_cache.shape[2], []
    for head in range(heads):
        taken = torch.arange(lists.shape[-1]) < counts[:, head, None]
        places = lists[:, head].long().where(taken, 0)[..., None].expand(-1, -1, p.q.shape[-1])
        k, v = (x[:, :, head].gather(1, places) for x in (p.k_cache, p.v_cache))
        visible = taken[:, None].expand(-1, p.q.shape[1], -1)
        if with_tree:
            k = torch.cat([k, p.k_tree[:, :, head]], 1)
            v = torch.cat([v, p.v_tree[:, :, head]], 1)
            visible = torch.cat([visible, p.tree_mask], -1)
        q, sink = p.q.chunk(heads, 2)[head], None if sinks is None else sinks.chunk(heads)[head]
        k, v = k[:, :, None], v[:, :, None]
        results.append(dense_attention(q, k, v, visible, sinks=sink, **options))
    return tuple(torch.cat(parts, 2) for parts in zip(*results, strict=True))


def check_gathered(problem, size, *, per_head, paged, with_tree, seed=0, **options):
    indices, lengths = random_lists(problem, size, per_head, seed)
    keys = (problem.k_tree, problem.v_tree, problem.tree_mask) if with_tree else (None,) * 3
    cache = problem.cache(paged)
    pair, table = (cache["k_cache"], cache["v_cache"]), cache.get("block_table")
    got = calls.sparse_gather_attention(problem.q, *pair, indices, lengths, *keys, table, **options)
    exact = eager(problem.to(torch.float64), indices, lengths, with_tree, **options)
    rough = eager(problem, indices, lengths, with_tree, **options)
    assert_accurate(got[0], exact[0], rough[0], atol=LUCK)
    assert_accurate(got[1], exact[1], rough[1], atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("with_tree", [False, True])
def test_gathered(isa, dtype, per_head, paged, with_tree):
    problem = make_problem((60, 7, 200), 3, q_heads=6, dtype=dtype, strided=True)
    form = {"per_head": per_head, "paged": paged, "with_tree": with_tree}
    check_gathered(problem, 90, **form, softcap=7.0, sinks=torch.linspace(-1, 1, 6))


@per_isa
@given(problem=problems(dtypes=DTYPES, head_dims=(8, 24, 64, 128)), data=st.data())
def test_gathered_on_random_problems(isa, problem, data):
    sinks = torch.linspace(-2, 2, problem.q.shape[2])
    check_gathered(
        problem,
        data.draw(st.integers(1, 50)),
        per_head=data.draw(st.booleans()),
        paged=data.draw(st.booleans()),
        with_tree=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 2**16)),
        softcap=data.draw(st.sampled_from([0.0, 5.0])),
        sinks=data.draw(st.sampled_from([None, sinks])),
    )
