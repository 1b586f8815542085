"""Gathered attention in C++ against the float64 reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import reference
from tests.cases import assert_accurate, make_problem, problems
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


def check_gathered(problem, size, *, per_head, paged, with_tree, seed=0, softcap=0.0, sinks=None):
    indices, lengths = random_lists(problem, size, per_head, seed)

    def inputs(p):
        keys = (p.k_tree, p.v_tree, p.tree_mask) if with_tree else (None,) * 3
        cache = p.cache(paged)
        table = cache.get("block_table")
        return p.q, cache["k_cache"], cache["v_cache"], indices, lengths, *keys, table

    wide = None if sinks is None else sinks.double()
    got = calls.sparse_gather_attention(*inputs(problem), softcap=softcap, sinks=sinks)
    rough = reference.sparse_gather_attention(*inputs(problem), softcap=softcap, sinks=sinks)
    exact = inputs(problem.to(torch.float64))
    exact = reference.sparse_gather_attention(*exact, softcap=softcap, sinks=wide)
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
