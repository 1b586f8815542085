"""Layers with a state on the Triton kernels: recurrence along every path, and the state behind."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specattn
from tests.cases import assert_accurate
from tests.states import DTYPES, causal_convs, gated_deltas, make_causal_conv, make_gated_delta

from .conftest import DEVICE, interpreted, mostly

SMALL = ((1, 1, 8, 8), (2, 4, 16, 24), (1, 3, 40, 8), (1, 2, 64, 72))


def on_device(arguments):
    """Return arguments on the device that is tested."""
    moved = {n: x.to(DEVICE) for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    return arguments | moved


def verified(problem, ragged=True, **changes):
    arguments = problem.arguments(ragged) | changes
    return [x.cpu() for x in specattn.gated_delta_tree(**on_device(arguments))]


def committed(function, state, rows, nodes, counts, **options):
    """Return the state that a commit leaves; `state` stays as it is."""
    state = state.clone().to(DEVICE)
    nodes = None if nodes is None else nodes.to(DEVICE)
    function(state, rows.to(DEVICE), nodes, counts.to(DEVICE), **on_device(options))
    return state.cpu()


def check_gated_delta(problem, ragged, seed=0):
    exact, exact_states = problem.expected()
    rough, rough_states = problem.expected(torch.float32)
    out, stash = verified(problem, ragged)
    assert_accurate(out.reshape(exact.shape), exact, rough.to(problem.q.dtype), atol=2e-7)
    nodes, counts = problem.paths(seed)
    rows = problem.row_options(ragged)
    after = committed(specattn.gated_delta_commit, problem.state, stash, nodes, counts, **rows)
    exact, rough = (problem.committed(x, nodes, counts) for x in (exact_states, rough_states))
    assert_accurate(after, exact, rough, atol=5e-7)
    assert torch.equal(after[counts == 0], problem.state[counts == 0])


@interpreted(16)
@given(gated_deltas(shapes=SMALL, per_channel=False), st.integers(0, 9))
def test_is_the_recurrence_along_every_path(given_, seed):
    check_gated_delta(*given_, seed)


@pytest.mark.parametrize("rows", mostly((33, 0, 4), (64,)), ids=str)
def test_many_rows(rows):
    tree = "tree" if len(rows) > 1 else "chain"
    check_gated_delta(make_gated_delta(rows, 1, 1, 24, 40, tree=tree), len(rows) > 1)


@pytest.mark.parametrize("change", [{"rows": (65,)}, {"per_channel": True}], ids=str)
def test_the_reference_serves_the_rest(change):
    problem = make_gated_delta(**change)
    with pytest.raises(RuntimeError, match="65 rows of a request|a decay per channel"):
        verified(problem)


def test_a_row_that_is_no_number_reaches_its_descendants_alone():
    problem = make_gated_delta((9,), 1, 1)
    problem.parents[:] = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5, 5])
    clean, _ = verified(problem)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(problem, name)[2] = torch.nan
    out, stash = verified(problem)
    assert out[[2, 5, 7, 8]].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4, 6]], clean[[0, 1, 3, 4, 6]])
    path = torch.tensor([[0, 1, 3]]), torch.tensor([3])
    rows = problem.row_options(ragged=True)
    after = committed(specattn.gated_delta_commit, problem.state, stash, *path, **rows)
    assert after.isfinite().all()


def test_a_state_that_is_no_number_stays_with_its_request():
    problem = make_gated_delta((3, 0, 3), 1, 2, 8, 8)
    clean, _ = verified(problem)
    problem.state[0] = torch.nan
    out, stash = verified(problem)
    assert out[:3].isnan().all()
    assert torch.equal(out[3:], clean[3:])
    counts, rows = torch.tensor([0, 0, 2]), problem.row_options(ragged=True)
    after = committed(specattn.gated_delta_commit, problem.state, stash, None, counts, **rows)
    assert torch.equal(after[:2].nan_to_num(7.0), problem.state[:2].nan_to_num(7.0))
    assert after[2].isfinite().all()


@pytest.mark.parametrize("decays", ["none", "strong"])
def test_a_commit_takes_decays_of_channels(decays):
    problem = make_gated_delta((5, 3), per_channel=True, decays=decays)
    with specattn.use_backend("reference"):
        _, stash = specattn.gated_delta_tree(**problem.arguments())
    nodes, counts = problem.paths(3)
    rows = problem.row_options(ragged=True)
    after = committed(specattn.gated_delta_commit, problem.state, stash, nodes, counts, **rows)
    exact, rough = (
        problem.committed(problem.expected(x)[1], nodes, counts)
        for x in (torch.float64, torch.float32)
    )
    assert_accurate(after, exact, rough, atol=5e-7)


@interpreted(16)
@given(causal_convs(), st.integers(0, 9))
def test_convolves_along_every_path(given_, seed):
    problem, ragged = given_
    exact, exact_kept = problem.expected()
    rough, _ = problem.expected(torch.float32)
    arguments = on_device(problem.arguments(ragged))
    out = specattn.causal_conv_tree(**arguments).cpu()
    assert_accurate(out.reshape(exact.shape), exact, rough.to(problem.x.dtype), atol=2e-7)
    nodes, counts = problem.paths(seed)
    rows, x = problem.row_options(ragged), problem.of_rows(problem.x, ragged)
    kept = committed(specattn.causal_conv_commit, problem.conv_state, x, nodes, counts, **rows)
    assert torch.equal(kept, problem.committed(exact_kept, nodes, counts).to(kept.dtype))


@pytest.mark.parametrize("dtype", mostly(*DTYPES), ids=str)
def test_what_is_no_number_reaches_its_channels_descendants_alone(dtype):
    problem = make_causal_conv((5,), channels=20, dtype=dtype)
    problem.parents[:] = torch.tensor([-1, 0, 0, 1, 2])
    clean = specattn.causal_conv_tree(**on_device(problem.arguments())).cpu()
    problem.x[2, 3] = torch.nan
    out = specattn.causal_conv_tree(**on_device(problem.arguments())).cpu()
    reached = torch.zeros(5, 20, dtype=torch.bool)
    reached[[2, 4], 3] = True
    assert torch.equal(out.isnan(), reached)
    assert torch.equal(out[~reached], clean[~reached])
