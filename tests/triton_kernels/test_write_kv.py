import pytest
from hypothesis import given

import specattn
from tests.writes import assert_same, writes

from .conftest import DEVICE, interpreted


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # NumPy's word for infinity
@interpreted(60)
@given(writes())
def test_is_plain_indexing(write):
    expected = write.expected()
    write = write.to(DEVICE)
    specattn.write_kv(**write.arguments())
    assert_same(write.room.cpu(), expected)
