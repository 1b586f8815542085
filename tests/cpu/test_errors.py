"""Wrong lengths, pages, indices and shapes are errors before memory is touched."""

import pytest
import torch

from specattn import _cpu
from tests.cases import make_problem
from tests.cpu import calls


def hybrid(problem, **changes):
    cache = problem.cache("block_table" in changes or changes.pop("paged", False))
    options = {"cache_seqlens": problem.cache_seqlens, "k_tree": problem.k_tree, **cache}
    options = {**options, "v_tree": problem.v_tree, **changes}
    return calls.hybrid_tree_attention(problem.q, **options)


@pytest.mark.parametrize("length", [-1, 10**6, 2**31 - 1])
@pytest.mark.parametrize("paged", [False, True])
def test_lengths(isa, length, paged):
    problem = make_problem((5, 12))
    problem.cache_seqlens[1] = length
    with pytest.raises(IndexError, match="cache_seqlens"):
        hybrid(problem, paged=paged)
    with pytest.raises(IndexError, match="cache_seqlens"):
        calls.importance_scores(problem.q, problem.k_cache, problem.cache_seqlens)
    with pytest.raises(IndexError, match="cache_seqlens"):
        calls.select_topk(torch.zeros(2, 9), problem.cache_seqlens, budget=3)


def test_tree_in_the_cache_needs_room(isa):
    problem = make_problem((5, 12), 4)
    problem.cache_seqlens[1] = problem.k_cache.shape[1] - 3
    with pytest.raises(IndexError, match="cache_seqlens"):
        hybrid(problem, k_tree=None, v_tree=None)


@pytest.mark.parametrize("page", [-1, 10**6])
def test_pages(isa, page):
    problem = make_problem((5, 12))
    problem.block_table[1, 2] = page
    with pytest.raises(IndexError, match="block_table"):
        hybrid(problem, paged=True)
    problem.block_table[1, 2] = 0
    problem.block_table[1, 3:] = page  # beyond the length: never looked at
    hybrid(problem, paged=True)


@pytest.mark.parametrize("position", [-1, 16, 2**31 - 1])
def test_indices(isa, position):
    problem = make_problem((5, 12), spare=4)
    assert problem.k_cache.shape[1] == 16
    indices = torch.zeros(2, 3, dtype=torch.int32)
    indices[1, 1] = position
    lengths = torch.tensor([3, 2], dtype=torch.int32)
    with pytest.raises(IndexError, match="indices"):
        calls.sparse_gather_attention(problem.q, problem.k_cache, problem.v_cache, indices, lengths)
    with pytest.raises(IndexError, match="index_lengths"):
        calls.sparse_gather_attention(
            problem.q, problem.k_cache, problem.v_cache, indices.clamp(0, 5), lengths + 1
        )


def test_collected_rows(isa):
    problem = make_problem((5,), 4, spare=8)
    options = {"cache_seqlens": problem.cache_seqlens, **problem.cache()}
    with pytest.raises(IndexError, match="collect_rows"):
        calls.verify_attention(problem.q, **options, collect_rows=(0, 4))


def test_number_of_arguments(isa):
    state = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1)
    with pytest.raises(TypeError, match="too few arguments"):
        _cpu.merge_state(*state, *state)
    with pytest.raises(TypeError, match="too many arguments"):
        _cpu.merge_state(*state, *state, *state, 1, 1)


def test_shapes_and_types(isa):
    problem = make_problem((5, 12))
    with pytest.raises(ValueError, match="v_tree must be"):
        hybrid(problem, v_tree=problem.v_tree[:, :, :1])
    with pytest.raises(ValueError, match="k_cache must be"):
        hybrid(problem, k_cache=problem.k_cache.half())
    with pytest.raises(ValueError, match="k_cache has the unknown type int16"):
        hybrid(problem, k_cache=problem.k_cache.short())
    with pytest.raises(ValueError, match="sinks must be of a floating type"):
        hybrid(problem, sinks=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="contiguous last dimension"):
        hybrid(problem, k_tree=problem.k_tree.transpose(1, 3).contiguous().transpose(1, 3))
