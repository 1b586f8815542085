"""Writing a cache against plain indexing, token by token."""

import torch
from hypothesis import given

from specattn import reference
from tests.writes import DTYPES, assert_same, make_write, writes


@given(writes())
def test_is_plain_indexing(write):
    expected = write.expected()
    assert reference.write_kv(**write.arguments()) is None
    assert_same(write.room, expected)


def test_float64_keeps_every_bit():
    write = make_write(dtype=torch.float64)
    expected = write.expected()
    reference.write_kv(**write.arguments())
    assert_same(write.room, expected)
    assert write.room.dtype == torch.float64 not in DTYPES
