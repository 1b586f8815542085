"""What the same bits are promised for: runs, neighbours, layouts of the cache, threads."""

import pytest
import torch

from tests.cases import make_problem
from tests.cpu import calls


@pytest.fixture
def threads():
    """Set the number of threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attend(problem, paged=False):
    tree = {n: getattr(problem, n) for n in ("k_tree", "v_tree", "tree_mask", "cache_seqlens")}
    return calls.hybrid_tree_attention(problem.q, **problem.cache(paged), **tree)


def assert_same_bits(results, expected):
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_from_run_to_run(isa, threads, count):
    threads(count)
    problem = make_problem((2500,), 4, dtype=torch.bfloat16)
    assert_same_bits([attend(problem) for _ in range(3)], attend(problem))


def test_whatever_the_neighbours(isa, threads):
    threads(2)
    problem = make_problem((1500, 3, 800), 4, dtype=torch.bfloat16)
    whole = attend(problem)
    problem.cache_seqlens[1:] = torch.tensor([700, 9])
    problem.k_tree[1:] += 1
    again = attend(problem)
    assert_same_bits([[x[:1] for x in again]], [x[:1] for x in whole])


def test_whatever_the_layout_of_the_cache(isa, threads):
    threads(2)
    problem = make_problem((2500, 300), 4, dtype=torch.bfloat16, page_size=16)
    strided = make_problem((2500, 300), 4, dtype=torch.bfloat16, page_size=16, strided=True)
    assert_same_bits(
        [attend(problem, True), attend(strided), attend(strided, True)], attend(problem)
    )


@pytest.mark.parametrize("rows", [1, 16])
def test_whatever_the_threads_and_the_batch_where_nothing_is_split(isa, threads, rows):
    problem = make_problem((879, 700), rows, q_heads=16, kv_heads=8, dtype=torch.bfloat16)
    threads(1)
    expected = attend(problem)
    for count in (2, 3, 8):
        threads(count)
        assert_same_bits([attend(problem)], expected)
        alone = attend(problem.request(0))
        assert_same_bits([alone], [x[:1] for x in expected])


def test_whatever_the_threads_for_what_has_no_splits(isa, threads):
    problem = make_problem((9000, 50), 2, head_dim=128, dtype=torch.bfloat16)
    outs, lses = torch.randn(3, 4, 16, 32, 128), torch.randn(3, 4, 16, 32)

    tree = {n: getattr(problem, n) for n in ("k_tree", "v_tree", "tree_mask", "cache_seqlens")}

    def run():
        collected = [
            calls.verify_attention(problem.q, **problem.cache(), **tree, per_head=per_head)[2]
            for per_head in (True, False)
        ]
        scores = calls.importance_scores(problem.q, problem.k_cache, problem.cache_seqlens)
        chosen = calls.select_topk(scores, problem.cache_seqlens, ratio=0.1)
        return scores, *collected, *chosen, *calls.merge_states(outs, lses)

    threads(1)
    expected = run()
    for count in (2, 5):
        threads(count)
        assert_same_bits([run()], expected)
