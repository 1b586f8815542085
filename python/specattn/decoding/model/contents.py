"""Whether a tensor still holds what it did when something was computed of it."""

from __future__ import annotations

from typing import Any

import torch

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Contents:
    """What a tensor holds: where it lies, its version, and a value of every row and column.

    Autograd counts what changes a tensor in place, but not what does so through ``.data`` or NumPy,
    as adapters are merged; reading all of it would take as long as a pass does.
    """

    def __init__(self, x: torch.Tensor):
        self._facts, self._values = _facts(x), [part.clone() for part in _values(x)]

    def are_of(self, x: torch.Tensor) -> bool:
        """Whether a tensor holds them now, as far as can be seen from so many values."""
        return _facts(x) == self._facts and all(map(torch.equal, _values(x), self._values))


def _facts(x: torch.Tensor) -> tuple[Any, ...]:
    version = None if x.is_inference() else x._version
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, version


def _values(x: torch.Tensor) -> list[torch.Tensor]:
    """Return diagonals of a tensor's matrices that cross every row and every column, as words."""
    x = x.detach().view(_WORDS[x.element_size()])
    if x.dim() < 2:
        return [x]
    tall = x if x.shape[-2] >= x.shape[-1] else x.mT
    rows, side = tall.shape[-2:]
    if not tall.numel():
        return []
    whole = rows // side * side
    squares = tall[..., :whole, :].unflatten(-2, (-1, side))
    return [piece.diagonal(dim1=-2, dim2=-1) for piece in (squares, tall[..., rows - side :, :])]
