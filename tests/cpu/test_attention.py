"""Hybrid and tree attention in C++ against the oracle."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import _cpu
from tests import covering
from tests.cases import MEDUSA_PARENTS, assert_accurate, expected, make_problem, problems
from tests.cpu import calls
from tests.cpu.conftest import at_once, each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# What one product or exp may be off where PyTorch happens to be exact.
LUCK = 5e-7
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def tree_of(problem, in_cache=False):
    keys = {} if in_cache else {"k_tree": problem.k_tree, "v_tree": problem.v_tree}
    return {**keys, "tree_mask": problem.tree_mask}


def check_hybrid(problem, *, paged=False, in_cache=False, isa=None, **options):
    oracle = {**options}
    if options.get("sinks") is not None:
        oracle["sinks"] = options["sinks"].double()
    exact = expected(problem.to(torch.float64), **oracle)
    rough = expected(problem, **options)
    for _ in each(isa or _cpu.isa()):
        got = calls.hybrid_tree_attention(
            problem.q,
            cache_seqlens=problem.cache_seqlens,
            **problem.cache(paged),
            **tree_of(problem, in_cache),
            **options,
        )
        assert_accurate(got[0], exact[0], rough[0], atol=LUCK)
        assert_accurate(got[1], exact[1], rough[1], atol=5e-7 * max(1.0, exact_size(exact[1])))


def exact_size(x):
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 1.0


@at_once
@per_isa
@given(problem=problems(dtypes=DTYPES, head_dims=(8, 24, 64, 80, 96, 128)), data=st.data())
def test_hybrid_on_random_problems(isa, problem, data):
    window = data.draw(st.sampled_from([None, 1, 3, 20]))
    softcap = data.draw(st.sampled_from([0.0, 5.0]))
    sinks = data.draw(st.sampled_from([None, torch.linspace(-2, 2, problem.q.shape[2])]))
    paged = data.draw(st.booleans())
    check_hybrid(problem, paged=paged, window=window, softcap=softcap, sinks=sinks, isa=isa)


@covering.pairs("dtype, rows, lengths", DTYPES, [1, 6, 30], [(8,), (40,), (70,)])
def test_what_another_call_left_does_not_matter(isa, dtype, rows, lengths):
    """Memory is kept between calls; here one whose values are all NaN has filled it."""
    for before in DTYPES:
        full = make_problem((128,), rows, dtype=before)
        full.v_cache.fill_(torch.nan)
        calls.hybrid_tree_attention(
            full.q, cache_seqlens=full.cache_seqlens, **full.cache(False), **tree_of(full)
        )
        check_hybrid(make_problem(lengths, rows, dtype=dtype))


@at_once
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 200, 256])
def test_head_dims(isa, dtype, head_dim):
    problem = make_problem((70, 0, 129), 3, head_dim=head_dim, dtype=dtype, strided=True)
    check_hybrid(problem, isa=isa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_tree_that_lies_in_the_cache(isa, dtype, paged):
    problem = make_problem((0, 9, 190), 7, dtype=dtype, tree_in_cache=True, strided=True)
    check_hybrid(problem, paged=paged, in_cache=True)
    check_hybrid(problem, paged=paged, in_cache=True, window=4)


@pytest.mark.parametrize("threads", [1, 3])
def test_long_prefixes_are_split_and_merged(isa, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        problem = make_problem((3000, 700), 4, parents="chain", dtype=torch.bfloat16, page_size=64)
        check_hybrid(problem)
        check_hybrid(problem, paged=True, window=900)
    finally:
        torch.set_num_threads(before)


def test_medusa_tree_of_many_rows(isa):
    problem = make_problem(
        (150, 64), len(MEDUSA_PARENTS), parents=MEDUSA_PARENTS, q_heads=8, dtype=torch.bfloat16
    )
    check_hybrid(problem)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 17, 33])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_every_number_of_row_tiles(isa, rows, head_dim):
    sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": head_dim}
    check_hybrid(make_problem((200, 31), rows, **sizes, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(isa, dtype, scale):
    problem = make_problem((150, 20), 5, dtype=dtype)
    check_hybrid(problem, softmax_scale=scale)
    check_hybrid(problem, softmax_scale=scale, softcap=3.0, window=90)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_logits_that_grow_along_the_keys(isa, dtype, rows):
    problem = make_problem((400,), rows, q_heads=8, kv_heads=2, dtype=dtype)
    problem.k_cache.mul_(torch.linspace(0, 6, problem.k_cache.shape[1])[:, None, None].to(dtype))
    check_hybrid(problem)
    check_hybrid(problem, softmax_scale=-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_logits_far_apart(isa, dtype, rows):
    """Each block's logits are far above those of all before, then far below: most weigh nothing."""
    problem = make_problem((640,), rows, q_heads=8, kv_heads=2, dtype=dtype)
    height = torch.tensor([0, 1, 2, 3, 4, 3, 2, 1, 0, 4]).repeat_interleave(64)
    problem.q[:] = 1
    problem.k_cache.mul_(0.1)
    problem.k_cache[:, :640] += (5 * height)[:, None, None]  # 40 more logits for each block
    check_hybrid(problem)
    check_hybrid(problem, softmax_scale=-0.5)


def test_a_nan_is_seen(isa):
    problem = make_problem((200,), 9, dtype=torch.bfloat16)
    problem.k_cache[:, 150] = torch.nan
    out, lse = calls.hybrid_tree_attention(
        problem.q, cache_seqlens=problem.cache_seqlens, **problem.cache(), **tree_of(problem)
    )
    assert out.isnan().all()
    assert lse.isnan().all()


def test_the_caller_keeps_its_denormal_numbers(isa):
    check_hybrid(make_problem((200,), 9, dtype=torch.bfloat16))
    tiny = torch.full((64,), 2.0**-140)
    assert (tiny * 2).view(torch.int32).all()  # bits: a flushed comparison would see zeros as well


def test_mask_wider_than_a_word(isa):
    check_hybrid(make_problem((33,), 90, tree_size=150, dtype=torch.float32))


def test_rows_than_see_earlier_nodes_only_in_part(isa):
    check_hybrid(make_problem((20, 3), 5, tree_size=80, dtype=torch.bfloat16, strided=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_chunk_of_a_prefill(isa, dtype):
    problem = make_problem((100, 0), 300, parents="chain", q_heads=4, head_dim=32, dtype=dtype)
    options = {"cache_seqlens": problem.cache_seqlens, **problem.cache()}
    keys = {"k_tree": problem.k_tree, "v_tree": problem.v_tree}
    got = calls.hybrid_tree_attention(problem.q, **options, **keys)
    exact, rough = expected(problem.to(torch.float64)), expected(problem)
    assert_accurate(got[0], exact[0], rough[0], atol=LUCK)
    assert_accurate(got[1], exact[1], rough[1], atol=2e-6)


@per_isa
@given(problem=problems(dtypes=DTYPES), capped=st.booleans())
def test_tree_alone(isa, problem, capped):
    softcap = 5.0 if capped else 0.0
    keys = (problem.k_tree, problem.v_tree, problem.tree_mask)
    got = calls.tree_attention(problem.q, *keys, softcap=softcap)
    exact = expected(problem.to(torch.float64), prefix=False, softcap=softcap)
    rough = expected(problem, prefix=False, softcap=softcap)
    assert_accurate(got[0], exact[0], rough[0], atol=LUCK)
    assert_accurate(got[1], exact[1], rough[1], atol=2e-6)


def test_rows_without_keys_are_empty_states(isa):
    problem = make_problem((0, 0), 3)
    hidden = torch.zeros_like(problem.tree_mask)
    problem.k_tree[:] = problem.v_tree[:] = torch.nan
    out, lse = calls.tree_attention(problem.q, problem.k_tree, problem.v_tree, hidden)
    assert (out == 0).all()
    assert lse.isneginf().all()


def test_a_huge_logit_gives_exactly_its_value(isa):
    q = torch.full((1, 1, 1, 8), 256.0)
    k, v = -torch.full((1, 1, 1, 8), 256.0), torch.arange(8.0).view(1, 1, 1, 8)
    out, lse = calls.tree_attention(q, k, v, softmax_scale=1.0)
    assert torch.equal(out, v)
    assert lse.item() == -524288.0


def test_a_path_that_the_machine_lacks_is_named(isa):
    with pytest.raises(ValueError, match="it has: "):
        _cpu.use_isa("z80")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_of_any_type(isa, dtype):
    problem = make_problem((70, 3))
    hybrid = {"cache_seqlens": problem.cache_seqlens, "k_tree": problem.k_tree}
    hybrid |= {**problem.cache(), "v_tree": problem.v_tree}
    sinks = torch.tensor([-2.0, 0.0, 0.5, 3.0])
    expected = calls.hybrid_tree_attention(problem.q, **hybrid, sinks=sinks)
    # Not contiguous either.
    strided = torch.stack([sinks, sinks + 9], 1).to(dtype)[:, 0]
    found = calls.hybrid_tree_attention(problem.q, **hybrid, sinks=strided)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
