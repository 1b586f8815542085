"""The gated delta rule in C++: recurrence along every path, from the state and into it."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import _cpu
from tests.cases import assert_accurate
from tests.cpu import calls
from tests.cpu.conftest import at_once, each
from tests.states import DTYPES, gated_deltas, make_gated_delta, path_of

LUCK = 2e-7
per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def verified(problem, ragged=True, **changes):
    return calls.gated_delta_tree(**problem.arguments(ragged) | changes)


def check(problem, ragged, seed=0, isa=None):
    """Outputs of all rows, and states behind a path of each request, to twice torch's error."""
    dtype = problem.q.dtype
    exact, exact_states = problem.expected()
    rough, rough_states = problem.expected(torch.float32)
    before = problem.state.clone()
    nodes, counts = problem.paths(seed)
    states = [problem.committed(x, nodes, counts) for x in (exact_states, rough_states)]
    for _ in each(isa or _cpu.isa()):
        problem.state.copy_(before)
        out, stash = verified(problem, ragged)
        assert torch.equal(problem.state, before)
        assert_accurate(out.reshape(exact.shape), exact, rough.to(dtype), atol=LUCK)
        path = nodes, counts
        calls.gated_delta_commit(problem.state, stash, *path, **problem.row_options(ragged))
        assert_accurate(problem.state, *states, atol=5e-7)
        assert torch.equal(problem.state[counts == 0], before[counts == 0])


@at_once
@per_isa
@given(gated_deltas(), st.integers(0, 9))
def test_is_the_recurrence_along_every_path(isa, given, seed):
    check(*given, seed, isa=isa)


@at_once
@pytest.mark.parametrize(
    ("tree", "per_channel", "dtype"),
    [
        ("chain", False, torch.float32),
        ("tree", False, torch.bfloat16),
        ("tree", True, torch.float32),
        pytest.param("chain", True, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_as_many_rows_as_there_may_be(isa, tree, per_channel, dtype):
    options = {"tree": tree, "per_channel": per_channel, "dtype": dtype}
    check(make_gated_delta((128,), 1, 2, 32, 40, **options), ragged=False, isa=isa)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_row_that_is_no_number_reaches_its_descendants_alone(isa, per_channel):
    problem = make_gated_delta((9,), per_channel=per_channel)
    problem.parents[:] = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5, 5])
    clean, clean_stash = verified(problem)
    for name in ("q", "k", "v", "g", "beta"):
        getattr(problem, name)[2] = torch.nan
    out, stash = verified(problem)
    assert out[[2, 5, 7, 8]].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4, 6]], clean[[0, 1, 3, 4, 6]])
    path = torch.tensor([[0, 1, 3]]), torch.tensor([3])
    states = problem.state.clone(), problem.state.clone()
    for state, kept in zip(states, (clean_stash, stash), strict=True):
        calls.gated_delta_commit(state, kept, *path, **problem.row_options(ragged=True))
    assert torch.equal(*states)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_request_that_is_no_number_keeps_it(isa, per_channel):
    problem = make_gated_delta((3, 0, 3), per_channel=per_channel)
    clean, _ = verified(problem)
    problem.state[0] = torch.nan
    out, stash = verified(problem)
    assert out[:3].isnan().all()
    assert torch.equal(out[3:], clean[3:])
    before = problem.state.clone()
    rows = problem.row_options(ragged=True)
    calls.gated_delta_commit(problem.state, stash, None, torch.tensor([0, 0, 2]), **rows)
    assert torch.equal(problem.state[:2].nan_to_num(7.0), before[:2].nan_to_num(7.0))
    assert problem.state[2].isfinite().all()


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_follow_from_its_path(isa, dtype, per_channel, monkeypatch):
    problem = make_gated_delta((23,), 2, 4, 64, 72, dtype=dtype, per_channel=per_channel)
    out, stash = verified(problem)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert all(map(torch.equal, verified(problem), (out, stash)))
    parents = problem.parents.tolist()
    for node in (0, 7, 22):
        path = path_of(parents, node)
        names = ("q", "k", "v", "g", "beta")
        alone = {name: getattr(problem, name)[None, path] for name in names}
        a, b = calls.gated_delta_tree(**alone, state=problem.state, l2_norm=True, parents=None)
        assert torch.equal(a[0], out[path])
        assert torch.equal(b[0], stash[path])
        states = problem.state.clone(), problem.state.clone()
        count = torch.tensor([len(path)])
        calls.gated_delta_commit(states[0], b, None, count)
        calls.gated_delta_commit(states[1], stash[None], torch.tensor([path]), count)
        assert torch.equal(*states)


@pytest.mark.parametrize(
    ("parents", "message"),
    [([0, 0, 1], "parents: expected values from -1 to -1, got 0"), ([-1, 0, 2], "from -1 to 1")],
)
def test_parents_that_come_too_late(isa, parents, message):
    problem = make_gated_delta((3,))
    with pytest.raises(IndexError, match=message):
        verified(problem, ragged=False, parents=torch.tensor(parents))


@pytest.mark.parametrize(
    ("nodes", "counts", "message"),
    [
        ([[0, 1], [0, 3]], [2, 2], "nodes: expected values from 0 to 2, got 3"),
        ([[0, 1], [-1, 3]], [2, 1], "nodes: expected values from 0 to 2, got -1"),
        ([[0, 1], [0, 1]], [2, 3], "counts: expected values from 0 to 2, got 3"),
        (None, [2, 4], "counts: expected values from 0 to 3, got 4"),
        (None, [-1, 0], "counts: expected values from 0 to 3, got -1"),
    ],
)
def test_a_wrong_path_changes_nothing(isa, nodes, counts, message):
    problem = make_gated_delta((3, 3))
    _, stash = verified(problem, ragged=False)
    before = problem.state.clone()
    nodes = None if nodes is None else torch.tensor(nodes)
    with pytest.raises(IndexError, match=message):
        calls.gated_delta_commit(problem.state, stash, nodes, torch.tensor(counts))
    assert torch.equal(problem.state, before)


def test_shapes_and_types(isa):
    a = make_gated_delta((3, 3)).arguments(ragged=False)
    for change, message in [
        ({"k": a["k"].half()}, "k must have the rows"),
        ({"v": a["v"][:, :, :3]}, "state must be"),
        ({"state": a["state"].double()}, "state must be"),
        ({"state": a["state"][:, :, :8].contiguous()}, "state must have the head_dim of q"),
        ({"g": a["g"][:, :2]}, "g must have the rows"),
        ({"parents": a["parents"].int()}, "parents must be"),
        ({"q": a["q"].double()}, "q must be float32, bfloat16 or float16"),
    ]:
        with pytest.raises(ValueError, match=message):
            calls.gated_delta_tree(**a | change)


def advanced(S, k, v, g, beta):
    """Return a state behind one more token, by plain recurrence in the dtype of the state."""
    k, v, g, beta = (x.to(S.dtype) for x in (k, v, g, beta))
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    S = g.exp()[:, None, None] * S
    d = beta[:, None] * (v - (S * k[..., None]).sum(-2))
    return S + k[..., None] * d[:, None]


@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_drift_is_that_of_the_recurrence(isa, rounds):
    """In each round a tree of seven is verified, and a path of it becomes part of the state."""
    generator = torch.Generator().manual_seed(1)
    tree, path = torch.tensor([-1, 0, 0, 1, 1, 2, 3]), torch.tensor([[0, 1, 3, 6]])
    ours = torch.zeros(1, 2, 32, 32)
    plain, exact = ours[0].clone(), ours[0].double()
    for round in range(rounds):
        q, k, v = torch.randn(3, 1, 7, 2, 32, generator=generator)
        g, beta = torch.rand(2, 1, 7, 2, generator=generator)
        g *= -0.02
        _, stash = calls.gated_delta_tree(q, k, v, g, beta, ours, l2_norm=True, parents=tree)
        count = round * 7 % 4 + 1
        calls.gated_delta_commit(ours, stash, path, torch.tensor([count]))
        for node in path[0, :count]:
            token = [x[0, node] for x in (k, v, g, beta)]
            plain, exact = advanced(plain, *token), advanced(exact, *token)
    error, allowed = ((x.double() - exact).norm() for x in (ours[0], plain))
    assert error <= 2 * allowed
