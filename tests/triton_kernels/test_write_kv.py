import pytest
from hypothesis import given, settings

import specattn
from tests.writes import assert_same, writes

from .conftest import DEVICE


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # NumPy's word for infinity
@settings(max_examples=60)
@given(writes())
def test_is_plain_indexing(write):
    expected = write.expected()
    write = write.to(DEVICE)
    specattn.write_kv(**write.arguments())
    assert_same(write.room.cpu(), expected)
