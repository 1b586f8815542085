"""Short convolutions over trees in C++: `conv1d` along every path, and what is kept of it."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import assert_accurate
from tests.cpu import calls
from tests.states import causal_convs, make_causal_conv

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@per_isa
@given(causal_convs(), st.integers(0, 9))
def test_is_conv1d_along_every_path(isa, given, seed):
    problem, ragged = given
    exact, kept = problem.expected()
    rough = problem.expected(problem.x.dtype)[0]
    before = problem.conv_state.clone()
    out = calls.causal_conv_tree(**problem.arguments(ragged))
    assert_accurate(out.reshape(exact.shape), exact, rough, atol=2e-7)
    assert torch.equal(problem.conv_state, before)
    nodes, counts = problem.paths(seed)
    x, rows = problem.of_rows(problem.x, ragged), problem.row_options(ragged)
    calls.causal_conv_commit(problem.conv_state, x, nodes, counts, **rows)
    assert torch.equal(problem.conv_state, problem.committed(kept, nodes, counts).to(before.dtype))


def test_many_channels_on_several_threads(isa, monkeypatch):
    problem = make_causal_conv((128, 128), 2000, dtype=torch.bfloat16)
    out = calls.causal_conv_tree(**problem.arguments(ragged=False))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(calls.causal_conv_tree(**problem.arguments(ragged=False)), out)


def test_a_row_that_is_no_number_reaches_as_far_as_the_kernel(isa):
    problem = make_causal_conv((7,), taps=3)
    problem.parents[:] = torch.tensor([-1, 0, 0, 1, 3, 2, 5])
    clean = calls.causal_conv_tree(**problem.arguments())
    problem.x[1] = torch.nan
    out = calls.causal_conv_tree(**problem.arguments())
    assert out.isnan().all(1).tolist() == [False, True, False, True, True, False, False]
    assert torch.equal(out[[0, 2, 5, 6]], clean[[0, 2, 5, 6]])


@pytest.mark.parametrize("counts", [[4, 0], [-1, 0]])
def test_a_wrong_count_changes_nothing(isa, counts):
    problem = make_causal_conv((3, 3))
    before = problem.conv_state.clone()
    x = problem.of_rows(problem.x, ragged=False)
    with pytest.raises(IndexError, match="counts: expected values from 0 to 3"):
        calls.causal_conv_commit(problem.conv_state, x, None, torch.tensor(counts))
    assert torch.equal(problem.conv_state, before)


def test_parents_that_come_too_late(isa):
    problem = make_causal_conv((3,))
    a = problem.arguments(ragged=False) | {"parents": torch.tensor([-1, 1, 0])}
    with pytest.raises(IndexError, match="parents: expected values from -1 to 0, got 1"):
        calls.causal_conv_tree(**a)


def test_shapes_and_types(isa):
    a = make_causal_conv((3, 3)).arguments(ragged=False)
    for change, message in [
        ({"weight": a["weight"].half()}, "weight must be"),
        ({"weight": a["weight"][:, :1]}, "weight must have 2 to 8 taps"),
        ({"conv_state": a["conv_state"][:, 1:]}, "conv_state must be"),
        ({"activation": "gelu"}, "activation must be silu"),
        ({"x": a["x"].double()}, "x must be float32, bfloat16 or float16"),
    ]:
        with pytest.raises(ValueError, match=message):
            calls.causal_conv_tree(**a | change)
