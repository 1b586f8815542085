"""Tensors that the tests of the C++ kernels start from."""

import torch


def normal(seed, *shapes, dtype):
    """Return random tensors of these shapes; those with K behind are scaled by K ** -0.5."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def apart(x, rows=1, columns=3):
    """Return `x` among NaN, its rows further apart and its first element anywhere."""
    room = x.new_full((x.shape[0] + rows, x.shape[1] + columns + 1), torch.nan)
    inside = room[rows:, columns : columns + x.shape[1]]
    inside.copy_(x)
    return inside
