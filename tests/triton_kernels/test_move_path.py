"""Accepted paths moved in all layers at once: exactly what indexing with them copies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels.move_path import move_path

from tests.moves import moved_by_indexing, moving

from .conftest import DEVICE, interpreted


@interpreted(30)
@given(seed=st.integers(0, 10**6))
def test_is_what_indexing_copies(seed):
    storage, *path = (x.to(DEVICE) for x in moving(seed))
    expected = moved_by_indexing(storage, *path)
    move_path(storage, *path)
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("depth", [1, 16, 17, 40])
def test_long_paths_over_their_own_rows(depth):
    """Every row is read by one step and written by the next."""
    storage = torch.arange(2 * (depth + 2)).float().view(1, 1, 1, -1, 1, 1).to(DEVICE)
    nodes = torch.arange(2, depth + 2, device=DEVICE)[None]
    counts, seqlens = torch.tensor([depth], device=DEVICE), torch.ones(1, dtype=torch.int32)
    move_path(storage, nodes, counts, seqlens.to(DEVICE))
    found = storage.flatten().tolist()
    assert found[: depth + 2] == [0, 1, *range(3, depth + 3)]
    assert found[depth + 2 :] == list(range(depth + 2, 2 * (depth + 2)))
