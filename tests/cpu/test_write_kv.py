"""Writing a cache in C++: plain indexing, on several threads, and nothing where a slot is wrong."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from specattn import _cpu
from tests.cpu.calls import run
from tests.writes import assert_same, make_write, writes


def written(write):
    """Write, as `specattn.ops` would call the kernel."""
    a = write.arguments()
    if a["k"].dim() == 3:
        a |= {name: a[name][None] for name in ("k", "v", "slots")}
    run("write_kv", *a.values(), *[None] * 4)
    return write.room


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes())
def test_is_plain_indexing(isa, write):
    expected = write.expected()
    assert_same(written(write), expected)


@pytest.mark.parametrize("layout", ["SPNHC", "SPHNC"])
def test_many_tokens_on_several_threads(isa, layout, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    write = make_write((3, 333), 70, 16, heads=4, head_dim=64, layout=layout)
    expected = write.expected()
    assert_same(written(write), expected)


@pytest.mark.parametrize("slot", [12, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_slot_behind_the_cache_writes_nothing(isa, slot, dtype):
    write = make_write((1, 5), slots_dtype=dtype)
    before = write.room.clone()
    write.slots[0, 4] = slot
    with pytest.raises(IndexError, match=f"slots: expected values from 0 to 11, got {slot}"):
        written(write)
    assert_same(write.room, before)


def test_of_tokens_that_share_a_slot_each_element_is_one_of_theirs(isa):
    write = make_write((1, 4), skipped=0.0)
    write.slots[:] = torch.tensor([3, 3, 3, 1])
    expected = write.expected()
    room = written(write)
    for new, cache, plain in zip((write.k, write.v), room, expected, strict=True):
        left = cache.view(-1, *cache.shape[2:])
        assert (left[3] == new[0, :3]).any(0).all()
        rest = [slot for slot in range(12) if slot != 3]
        assert torch.equal(left[rest], plain.view(-1, *cache.shape[2:])[rest])


def test_shapes_and_types(isa):
    a = make_write((1, 5)).arguments()
    for change, message in [
        ({"v": a["v"].half()}, "v must be"),
        ({"v_cache": a["v_cache"].half()}, "v_cache must be"),
        ({"k_cache": a["k_cache"][:, :, :1]}, "k_cache must be"),
        ({"k_cache": a["k_cache"].double()}, "k_cache must be float32, bfloat16 or float16"),
        ({"slots": a["slots"].float()}, "slots must be"),
        ({"slots": a["slots"][:, :4]}, "slots must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            _cpu.write_kv(*(a | change).values(), *[None] * 4, 1)
