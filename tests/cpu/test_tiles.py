"""Tiles of codes in C++: the products and the numbers of the same codes in rows."""

import pytest
import torch
from specattn.reference import _codes

from specattn import _cpu
from tests import covering
from tests.codes import weights
from tests.cpu import calls
from tests.cpu.tensors import normal
from tests.linear import DTYPES, check

FORMS = [(32, 1), (160, 5), (192, 3), (200, 1), (1024, 8), (4608, 72)]


def tiled(codes, scale, zero, depth):
    """Return codes in tiles, and what their groups have."""
    zero = None if zero is None else _codes.in_tiles(zero)
    return _codes.to_tiles(codes, depth), _codes.in_tiles(scale), zero


@covering.pairs("form, bits, zeros, dtype", FORMS, [8, 4], [False, True], DTYPES)
def test_against_rows(isa, form, bits, zeros, dtype):
    depth, groups = form
    coded = weights(112, depth, groups, bits, zeros, torch.bfloat16, 0)
    tiles = tiled(*coded, depth)
    assert torch.equal(
        _codes.dequantised(*tiles, depth, torch.float64),
        _codes.dequantised(*coded, depth, torch.float64),
    )
    (x,) = normal(1, (21, depth), dtype=dtype)
    whole = calls.poisoned(21, 112, dtype=dtype)
    _cpu.linear_parts(x, [tiles], [None], None, None, whole, 2)
    check([x, coded[0], None, None, None, None, *coded[1:]], whole)
    for count in (1, 2, 3, 5, 8):
        some = calls.poisoned(count, 112, dtype=dtype)
        _cpu.linear_parts(x[4 : 4 + count], [tiles], [None], None, None, some, 1)
        assert torch.equal(some, whole[4 : 4 + count])
    found, expected = (torch.empty(112, depth, dtype=dtype) for _ in range(2))
    _cpu.dequantise(*tiles, found, 2)
    _cpu.dequantise(*coded, expected, 2)
    assert torch.equal(found, expected)


def test_what_is_no_tile_is_refused(isa):
    tiles, scale, _ = tiled(*weights(32, 64, 2, 4, False, torch.float32, 0), 64)
    x, out = torch.ones(1, 64), torch.empty(1, 31)
    with pytest.raises(ValueError, match="must be tiles of 16 rows and whole words"):
        _cpu.linear_parts(x, [(tiles[:31], scale[:31], None)], [None], None, None, out, 1)
