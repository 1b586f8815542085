"""Layers with a state: what is checked beside types and shapes, on every backend of a CPU."""

import pytest
import torch

import specattn
from tests.states import make_causal_conv, make_gated_delta


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def backend(request):
    """Force a backend."""
    if specattn.backends()[request.param] != "available":
        pytest.skip(f"{request.param} is not built")
    with specattn.use_backend(request.param):
        yield request.param


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("late", [1, 2])
def test_parents_that_come_too_late(ragged, late):
    delta, conv = make_gated_delta((3, 3)), make_causal_conv((3, 3))
    for problem in (delta, conv):
        problem.parents[:] = torch.tensor([-1, 0, 1, -1, late, 0])
    message = f"parents: expected values from -?[01] to 0, got {late}"
    with pytest.raises(IndexError, match=message):
        specattn.gated_delta_tree(**delta.arguments(ragged))
    with pytest.raises(IndexError, match=message):
        specattn.causal_conv_tree(**conv.arguments(ragged))


@pytest.mark.parametrize(
    ("nodes", "counts", "message"),
    [
        ([[0, 1], [0, 2]], [2, 2], "nodes: expected values from 0 to 1, got 2"),
        ([[0, 1], [-1, 9]], [2, 1], "nodes: expected values from 0 to 1, got -1"),
        ([[0, 1], [0, 1]], [2, 3], "counts: expected values from 0 to 2, got 3"),
        ([[0], [0]], [1, 2], "counts: expected values from 0 to 1, got 2"),
        (None, [3, 3], "counts: expected values from 0 to 2, got 3"),
    ],
)
def test_a_wrong_path_changes_nothing(nodes, counts, message):
    delta, conv = make_gated_delta((3, 2)), make_causal_conv((3, 2))
    path = None if nodes is None else torch.tensor(nodes), torch.tensor(counts)
    rows = delta.row_options(ragged=True)
    _, stash = specattn.gated_delta_tree(**delta.arguments())
    before = delta.state.clone(), conv.conv_state.clone()
    with pytest.raises(IndexError, match=message):
        specattn.gated_delta_commit(delta.state, stash, *path, **rows)
    with pytest.raises(IndexError, match=message):
        specattn.causal_conv_commit(conv.conv_state, conv.x, *path, **rows)
    assert torch.equal(delta.state, before[0])
    assert torch.equal(conv.conv_state, before[1])


def test_rows_that_are_dealt_wrongly():
    delta, conv = make_gated_delta((3, 2)), make_causal_conv((3, 2))
    starts = {"cu_seqlens_q": torch.tensor([0, 3, 4], dtype=torch.int32)}
    with pytest.raises(IndexError, match="cu_seqlens_q: expected to end with q's 5 rows, got 4"):
        specattn.gated_delta_tree(**delta.arguments() | starts)
    with pytest.raises(IndexError, match="cu_seqlens_q: expected to end with .* 5 rows, got 4"):
        specattn.causal_conv_tree(**conv.arguments() | starts)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((129,), 1, 1, 8, 8), "q: expected at most 128 rows, got 129"),
        (((2,), 1, 1, 12, 8), "state: Dk: expected a multiple of 8 up to 256, got 12"),
        (((2,), 1, 1, 8, 264), "state: Dv: expected a multiple of 8 up to 256, got 264"),
        (((2,), 2, 3, 8, 8), "v: expected heads in multiples of Hk=2, got 3"),
    ],
)
def test_sizes_that_are_not_served(sizes, message):
    with pytest.raises(ValueError, match=message):
        specattn.gated_delta_tree(**make_gated_delta(*sizes).arguments())


def test_options_that_are_not_served():
    conv, delta = make_causal_conv((2,)), make_gated_delta((2,))
    with pytest.raises(ValueError, match="activation: expected one of .* got 'gelu'"):
        specattn.causal_conv_tree(**conv.arguments() | {"activation": "gelu"})
    with pytest.raises(ValueError, match="weight: K: expected 2 to 8 taps, got 9"):
        specattn.causal_conv_tree(**make_causal_conv((2,), taps=9).arguments())
    with pytest.raises(TypeError, match="l2_norm: expected True or False, got 1"):
        specattn.gated_delta_tree(**delta.arguments() | {"l2_norm": 1})
    with pytest.raises(ValueError, match=r"stash.shape: expected 41 numbers"):
        specattn.gated_delta_tree(**delta.arguments(), stash=torch.empty(2, 4, 40))
    with pytest.raises(ValueError, match=r"stash.shape: expected 41 or 56 numbers"):
        specattn.gated_delta_commit(delta.state, torch.empty(1, 2, 4, 40), None, torch.tensor([1]))
