"""The gated delta rule over trees against plain recurrence, path by path, and transformers' own."""

import pytest
import torch
from hypothesis import given

import specattn
from specattn import reference
from tests.states import gated_deltas, make_gated_delta

F64 = (torch.float64,)
EXACT = {"rtol": 1e-9, "atol": 1e-9}


@given(gated_deltas(F64))
def test_is_the_recurrence_along_every_path(given):
    problem, ragged = given
    problem = problem.to(torch.float64)
    before = problem.state.clone()
    out, _ = reference.gated_delta_tree(**problem.arguments(ragged))
    expected = problem.of_rows(problem.expected()[0], ragged)
    torch.testing.assert_close(out, expected, **EXACT)
    assert torch.equal(problem.state, before)


def test_the_public_function_takes_float64():
    problem = make_gated_delta((9, 9)).to(torch.float64)
    out, stash = specattn.gated_delta_tree(**problem.arguments(ragged=False))
    expected = problem.of_rows(problem.expected()[0], ragged=False)
    torch.testing.assert_close(out, expected, **EXACT)
    assert stash.dtype == torch.float64
    assert stash.shape == (2, 9, 4, 16 + 24 + 1)


@pytest.mark.parametrize("name", ["recurrent", "chunk"])
def test_a_chain_is_transformers_own(name):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs = getattr(modeling, f"torch_{name}_gated_delta_rule")
    problem = make_gated_delta((37, 37), 2, 4, 32, 48, tree="chain")
    a = problem.arguments(ragged=False)
    expected, state = theirs(
        *(a[name] for name in ("q", "k", "v", "g", "beta")), initial_state=a["state"],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out, stash = reference.gated_delta_tree(**a)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)
    reference.gated_delta_commit(a["state"], stash, None, torch.tensor([37, 37]))
    torch.testing.assert_close(a["state"], state, rtol=1e-5, atol=1e-5)


def test_every_path_of_a_tree_is_transformers_own():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    problem = make_gated_delta((14,), 2, 4, 32, 48)
    a = problem.arguments(ragged=False)
    out, stash = reference.gated_delta_tree(**a)
    parents = problem.parents.tolist()
    for node in range(14):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        expected, state = modeling.torch_recurrent_gated_delta_rule(
            *(a[name][:, path] for name in ("q", "k", "v", "g", "beta")),
            initial_state=a["state"], output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        torch.testing.assert_close(out[:, node], expected[:, -1], rtol=1e-5, atol=2e-6)
        after = a["state"].clone()
        reference.gated_delta_commit(after, stash, torch.tensor([path]), torch.tensor([len(path)]))
        torch.testing.assert_close(after, state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_row_that_is_no_number_reaches_its_descendants_alone(per_channel):
    problem = make_gated_delta((9,), per_channel=per_channel).to(torch.float64)
    problem.parents[:] = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5, 5])
    clean = reference.gated_delta_tree(**problem.arguments())[0]
    for name in ("q", "k", "v", "g", "beta"):
        getattr(problem, name)[2] = torch.nan
    out = reference.gated_delta_tree(**problem.arguments())[0]
    hit = [2, 5, 7, 8]
    assert out[hit].isnan().all()
    rest = [0, 1, 3, 4, 6]
    assert torch.equal(out[rest], clean[rest])
