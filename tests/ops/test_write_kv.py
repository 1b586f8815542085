"""What the public function adds: both shapes, checks, tracing."""

import pytest
import torch
from hypothesis import given

import specattn
from tests.writes import assert_same, make_write, writes


@given(writes())
def test_is_plain_indexing(write):
    expected = write.expected()
    assert specattn.write_kv(**write.arguments()) is None
    assert_same(write.room, expected)


@pytest.mark.parametrize("tokens", [(5,), (2, 3)])
def test_a_compiled_call_writes_the_caches_it_is_given(tokens, fresh_compiler):
    write = make_write(tokens, layout="heads first")
    expected = write.expected()
    compiled = torch.compile(specattn.write_kv, fullgraph=True, backend="aot_eager")
    compiled(**write.arguments())
    assert_same(write.room, expected)


def test_float64_is_served_by_the_reference():
    write = make_write(dtype=torch.float64)
    expected = write.expected()
    specattn.write_kv(**write.arguments())
    assert_same(write.room, expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_slot_behind_the_cache_writes_nothing(backend):
    if specattn.backends()[backend] != "available":
        pytest.skip(f"{backend} is not available")
    write = make_write()
    write.slots[4] = 12
    before = write.room.clone()
    with (
        specattn.use_backend(backend),
        pytest.raises(IndexError, match="^slots: expected values from 0 to 11, got 12"),
    ):
        specattn.write_kv(**write.arguments())
    assert_same(write.room, before)


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("v", lambda x: x[:4], ValueError, r"expected shape \[tokens=5, Hk=2, head_dim=8\]"),
        ("v", lambda x: x.half(), TypeError, "expected torch.float32 as k is torch.float32"),
        ("slots", lambda x: x[None], ValueError, r"expected shape \[tokens=5\], got \[1, 5\]"),
        ("slots", lambda x: x.float(), TypeError, "expected torch.int64 or torch.int32"),
        ("k_cache", lambda x: x[..., :4], ValueError, "expected shape .*head_dim=8.*, got"),
        ("k_cache", lambda x: x.double(), TypeError, "expected torch.float32 or torch.bfloat16"),
        ("v_cache", lambda x: x[:1], ValueError, "expected shape .*pages=4, page_size=3"),
        ("v_cache", lambda x: x.half(), TypeError, "expected torch.float32 as k_cache, got"),
    ],
)
def test_wrong_arguments(name, change, error, message):
    arguments = make_write().arguments()
    with pytest.raises(error, match=f"^{name}: {message}"):
        specattn.write_kv(**arguments | {name: change(arguments[name])})


def test_one_slot_for_each_token_of_a_batch():
    arguments = make_write((2, 3)).arguments()
    with pytest.raises(ValueError, match=r"^slots: expected shape \[B=2, T=3\], got \[6\]"):
        specattn.write_kv(**arguments | {"slots": arguments["slots"].flatten()})
