"""States behind accepted paths against plain recurrence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn import reference
from tests.states import gated_deltas, make_gated_delta


@given(gated_deltas((torch.float64,)), st.integers(0, 9))
def test_is_the_recurrence_along_the_path(given, seed):
    problem, ragged = given
    problem = problem.to(torch.float64)
    nodes, counts = problem.paths(seed)
    expected = problem.committed(problem.expected()[1], nodes, counts)
    _, stash = reference.gated_delta_tree(**problem.arguments(ragged))
    untouched = problem.state[counts == 0].clone()
    rows = problem.row_options(ragged)
    assert reference.gated_delta_commit(problem.state, stash, nodes, counts, **rows) is None
    torch.testing.assert_close(problem.state, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(problem.state[counts == 0], untouched)


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_chunks_with_a_commit_behind_each_are_one_chain(tree):
    """A prefill in chunks of 64; a tree behind it begins where a chain of all tokens ends."""
    whole = make_gated_delta((150,), 1, 2, 16, 8, tree="chain").to(torch.float64)
    expected, states = whole.expected()
    state = whole.state.clone()
    for first in range(0, 150, 64):
        rows = slice(first, first + 64)
        a = {n: getattr(whole, n)[None, rows] for n in ("q", "k", "v", "g", "beta")}
        out, stash = reference.gated_delta_tree(**a, state=state, l2_norm=True)
        torch.testing.assert_close(out[0], expected[rows], rtol=1e-9, atol=1e-9)
        reference.gated_delta_commit(state, stash, None, torch.tensor([out.shape[1]]))
    torch.testing.assert_close(state[0], states[-1], rtol=1e-9, atol=1e-9)
    behind = make_gated_delta((6,), 1, 2, 16, 8, tree=tree, seed=1).to(torch.float64)
    behind.state = states[-1:]
    out, _ = reference.gated_delta_tree(**behind.arguments(ragged=False) | {"state": state})
    torch.testing.assert_close(out[0], behind.expected()[0], rtol=1e-9, atol=1e-9)
