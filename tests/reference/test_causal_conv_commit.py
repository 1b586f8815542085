"""What a convolution keeps behind accepted paths."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn import reference
from tests.states import causal_convs


@given(causal_convs((torch.float64,)), st.integers(0, 9))
def test_keeps_the_last_inputs_of_the_path(given, seed):
    problem, ragged = given
    problem = problem.to(torch.float64)
    nodes, counts = problem.paths(seed)
    expected = problem.committed(problem.expected()[1], nodes, counts)
    x, rows = problem.of_rows(problem.x, ragged), problem.row_options(ragged)
    assert reference.causal_conv_commit(problem.conv_state, x, nodes, counts, **rows) is None
    assert torch.equal(problem.conv_state, expected)
