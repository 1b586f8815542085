"""Short convolutions over trees against `conv1d` along every path."""

import pytest
import torch
from hypothesis import given

from specattn import reference
from tests.states import causal_convs, make_causal_conv


@given(causal_convs((torch.float64,)))
def test_is_conv1d_along_every_path(given):
    problem, ragged = given
    problem = problem.to(torch.float64)
    out = reference.causal_conv_tree(**problem.arguments(ragged))
    expected = problem.of_rows(problem.expected()[0], ragged)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_a_chain_is_transformers_own():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    problem = make_causal_conv((1, 1), bias=False)
    a = problem.arguments(ragged=False)
    theirs = torch.cat([torch.zeros_like(a["conv_state"][:, :1]), a["conv_state"]], 1).mT
    expected = modeling.causal_conv1d_update(
        a["x"].mT, theirs.contiguous(), a["weight"], None, "silu"
    )
    torch.testing.assert_close(reference.causal_conv_tree(**a), expected.mT)


def test_a_row_that_is_no_number_reaches_as_far_as_the_kernel():
    problem = make_causal_conv((7,), taps=3).to(torch.float64)
    problem.parents[:] = torch.tensor([-1, 0, 0, 1, 3, 2, 5])
    problem.x[1] = torch.nan
    out = reference.causal_conv_tree(**problem.arguments())
    assert out.isnan().any(1).tolist() == [False, True, False, True, True, False, False]
