"""A tensor that was changed is noticed, however it was."""

import pytest
import torch

from specattn.decoding.model.contents import Contents

SHAPES = [(5,), (1, 7), (6, 6), (13, 4), (4, 13), (3, 5, 8), (2, 9, 4)]


def tensors():
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float64):
            yield torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)


def test_what_stays_is_known_again():
    for x in tensors():
        contents = Contents(x)
        assert contents.are_of(x)
        assert contents.are_of(x.detach())
        assert not contents.are_of(x.clone())
        assert not contents.are_of(x.view(torch.int8)) or x.dtype == torch.int8


def test_a_row_or_a_column_that_changes_behind_autograd_is_noticed():
    for x in tensors():
        for dim in range(x.dim()):
            for n in range(x.shape[dim]):
                contents, version = Contents(x), x._version
                x.data.select(dim, n).add_(1)
                assert x._version == version
                assert not contents.are_of(x), (x.shape, dim, n)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.view(-1)[-2].add_(1),
        lambda x: setattr(x, "data", x.data.clone()),
        lambda x: setattr(x, "data", x.data.double()),
        lambda x: setattr(x, "data", x.data[:2]),
    ],
)
def test_other_changes_are_noticed(change):
    x = torch.ones(5, 7)
    contents = Contents(x)
    change(x)
    assert not contents.are_of(x)


def test_a_nan_is_a_value():
    x = torch.full((3, 3), torch.nan)
    assert Contents(x).are_of(x)


def test_views_and_tensors_of_inference_mode():
    whole = torch.randn(4, 6, 10)
    for x in (whole[:, 1:3], whole.mT, whole[..., ::2], whole[:, :0], whole[0, 0, 0]):
        assert Contents(x).are_of(x)
    with torch.inference_mode():
        x = torch.ones(3, 4)
        contents = Contents(x)
        assert contents.are_of(x)
        x[0] += 1
        assert not contents.are_of(x)
