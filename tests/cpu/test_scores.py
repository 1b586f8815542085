"""Collected logits and scores, importance and selection in C++ against the reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import _cpu, reference
from tests.cases import assert_accurate, make_problem, problems
from tests.cpu import calls
from tests.cpu.conftest import at_once, each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def verify_both(problem, paged, in_cache=False, isa=None, **options):
    """Yield what each code path of the kernel hands out, and what the float64 reference does."""

    def inputs(p):
        keys = {} if in_cache else {"k_tree": p.k_tree, "v_tree": p.v_tree}
        lengths = {"cache_seqlens": p.cache_seqlens, "tree_mask": p.tree_mask}
        return {**p.cache(paged), **keys, **lengths, **options}

    exact = problem.to(torch.float64)
    wide = reference.verify_attention(exact.q, **inputs(exact))
    for _ in each(isa or _cpu.isa()):
        yield calls.verify_attention(problem.q, **inputs(problem)), wide


def check_scores(problem, paged=False, in_cache=False, isa=None, **options):
    only_here = ("collect_rows", "per_head")
    plain = {name: value for name, value in options.items() if name not in only_here}
    keys = {} if in_cache else {"k_tree": problem.k_tree, "v_tree": problem.v_tree}
    for got, exact in verify_both(problem, paged, in_cache, isa, collect="scores", **options):
        # Logits of numbers that are exact in any of the types: only float32 sums err.
        assert_accurate(got[2], exact[2], exact[2].float(), atol=2e-6)
        alone = calls.hybrid_tree_attention(
            problem.q,
            cache_seqlens=problem.cache_seqlens,
            tree_mask=problem.tree_mask,
            **problem.cache(paged),
            **keys,
            **plain,
        )
        assert torch.equal(got[0], alone[0])  # collecting changes no bit of the result
        assert torch.equal(got[1], alone[1])


def check_logits(problem, paged=False, isa=None, **options):
    for got, exact in verify_both(problem, paged, isa=isa, collect="logits", **options):
        assert_accurate(got[2], exact[2], exact[2].to(torch.bfloat16), atol=2e-6)


@per_isa
@given(problem=problems(dtypes=DTYPES), data=st.data())
def test_collecting(isa, problem, data):
    rows = problem.q.shape[1]
    options = {
        "window": data.draw(st.sampled_from([None, 2, 20])),
        "softcap": data.draw(st.sampled_from([0.0, 5.0])),
        "collect_rows": data.draw(st.sampled_from([(0, -1), (rows - 1,), (-1, 0, 0)])),
    }
    paged = data.draw(st.booleans())
    check_scores(problem, paged, **options, per_head=data.draw(st.booleans()))
    check_logits(problem, paged, **options)


@at_once
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("collect_rows", [(0, -1), (100, 3)])
def test_collecting_from_several_row_groups(isa, collect_rows, per_head):
    problem = make_problem((70, 200), 130, q_heads=8, dtype=torch.bfloat16)
    check_scores(problem, collect_rows=collect_rows, per_head=per_head, isa=isa)
    check_logits(problem, collect_rows=collect_rows, window=60, isa=isa)


@at_once
@pytest.mark.parametrize("rows", [3, 130])
def test_scores_of_all_heads_in_several_tasks(isa, rows):
    problem = make_problem((700, 2100), rows, q_heads=32, kv_heads=8, head_dim=128)
    check_scores(problem, per_head=False, window=600, isa=isa)


@pytest.mark.parametrize("per_head", [True, False])
def test_collecting_with_the_tree_in_the_cache(isa, per_head):
    problem = make_problem((70, 1200), 5, dtype=torch.bfloat16, tree_in_cache=True)
    check_scores(problem, paged=True, in_cache=True, per_head=per_head)


@per_isa
@given(problem=problems(dtypes=DTYPES, head_dims=(8, 40, 64, 128)), per_head=st.booleans())
def test_importance(isa, problem, per_head):
    exact = problem.to(torch.float64)
    for paged in (False, True):
        cache, wide = problem.cache(paged), exact.cache(paged)
        table = cache.get("block_table")
        got = calls.importance_scores(
            problem.q, cache["k_cache"], problem.cache_seqlens, per_head, table
        )
        want = reference.importance_scores(
            exact.q, wide["k_cache"], exact.cache_seqlens, per_head, table
        )
        assert_accurate(got, want, want.float(), atol=1e-6)


def test_importance_of_many_keys(isa):
    problem = make_problem((2100, 5, 0), 16, dtype=torch.bfloat16, head_dim=128)
    exact = problem.to(torch.float64)
    got = calls.importance_scores(problem.q, problem.k_cache, problem.cache_seqlens)
    want = reference.importance_scores(exact.q, exact.k_cache, exact.cache_seqlens)
    assert_accurate(got, want, want.float(), atol=1e-6)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-140, torch.inf, -torch.inf, torch.nan]


@per_isa
@given(
    rows=st.lists(
        st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), min_size=12, max_size=12),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
def test_selection(isa, rows, data):
    scores = torch.tensor(rows)
    per_head = data.draw(st.booleans())
    batch = len(rows)
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch)))
    size = data.draw(
        st.sampled_from([{"ratio": 0.0}, {"ratio": 0.3}, {"ratio": 1.0}, {"budget": 5}])
    )
    small = st.sampled_from([0, 1, 4])
    options = {n: data.draw(small) for n in ("min_tokens", "keep_first", "keep_last")}
    if per_head:
        scores = torch.stack([scores, scores.flip(-1)], 1)
    got = calls.select_topk(scores, lengths.int(), **size, **options)
    want = reference.select_topk(scores, lengths.int(), **size, **options)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("kind", ["normal", "ties", "constant"])
def test_selection_of_long_rows(isa, kind):
    scores = torch.randn(2, 3, 5000)
    if kind != "normal":
        scores = (scores * 3).round() if kind == "ties" else torch.zeros_like(scores)
    lengths = torch.tensor([5000, 3333], dtype=torch.int32)
    options = {"ratio": 0.07, "keep_first": 4, "keep_last": 16}
    got = calls.select_topk(scores, lengths, **options)
    want = reference.select_topk(scores, lengths, **options)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
