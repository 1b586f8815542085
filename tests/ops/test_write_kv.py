"""What the public function adds: both shapes, checks, tracing."""

import pytest
import torch
from hypothesis import given

import specattn
from tests.eight_bits import EIGHT_BITS, nearest
from tests.writes import assert_same, make_write, writes


@given(writes())
def test_is_plain_indexing(write):
    expected = write.expected()
    assert specattn.write_kv(**write.arguments()) is None
    assert_same(write.room, expected)


@pytest.mark.parametrize("tokens", [(5,), (2, 3)])
def test_a_compiled_call_writes_the_caches_it_is_given(tokens, fresh_compiler):
    write = make_write(tokens, layout="SPHNC")
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
        ("v", lambda x: x[:4], ValueError, r"expected shape \[tokens=5, Hk=2, v_head_dim\]"),
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


types = pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)


def eight_bit_write(dtype, **scales):
    """Return the arguments of a write into caches of 8 bits that hold ones, and their bytes."""
    arguments = make_write((2, 3)).arguments()
    caches = {n: torch.ones_like(arguments[n]).to(dtype) for n in ("k_cache", "v_cache")}
    return arguments | caches | scales


def places_of(arguments):
    """Return which tokens are kept, and where they go."""
    slots = arguments["slots"].flatten()
    return slots >= 0, slots[slots >= 0]


@types
def test_given_scales_are_divided_by_before_rounding(dtype):
    per_token = torch.rand(4, 3, 2) + 0.5
    arguments = eight_bit_write(dtype, k_scale=torch.tensor([0.01, 3.0]), v_scale=per_token)
    specattn.write_kv(**arguments)
    kept, slots = places_of(arguments)
    for name, scale in (("k", arguments["k_scale"]), ("v", per_token.flatten(0, 1)[slots])):
        new = arguments[name].flatten(0, 1)[kept] / scale[..., None]
        stored = arguments[f"{name}_cache"].flatten(0, 1)
        assert torch.equal(stored[slots].double(), nearest(new, dtype).double())
        rest = torch.ones(len(stored), dtype=torch.bool).index_fill(0, slots, False)
        assert (stored[rest].double() == 1).all()


@types
def test_dynamic_scales_are_written_beside_the_tokens(dtype):
    inline = torch.full((4, 3, 2, 3), 9.0)[..., 1]
    arguments = eight_bit_write(dtype, k_scale=torch.full((4, 3, 2), 9.0), v_scale=inline)
    specattn.write_kv(**arguments, scale="dynamic")
    kept, slots = places_of(arguments)
    most = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    for name in "kv":
        new = arguments[name].flatten(0, 1)[kept]
        scale = arguments[f"{name}_scale"].flatten(0, 1)
        assert torch.equal(scale[slots], (new.abs().amax(-1) / most).clamp(min=1e-6))
        stored = arguments[f"{name}_cache"].flatten(0, 1)[slots]
        assert torch.equal(stored.double(), nearest(new / scale[slots][..., None], dtype).double())
        assert (scale == 9).sum() == 2 * (len(scale) - len(slots))


def test_bytes_of_uint8_caches_are_what_is_said():
    arguments = eight_bit_write(torch.float8_e5m2, k_scale=0.3, v_scale=7)
    views = {n: arguments[n].clone().view(torch.uint8) for n in ("k_cache", "v_cache")}
    specattn.write_kv(**arguments)
    specattn.write_kv(**arguments | views, cache_dtype=torch.float8_e5m2)
    for name, view in views.items():
        assert torch.equal(view, arguments[name].view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": "own"}, ValueError, "scale: expected 'given' or 'dynamic', got 'own'"),
        ({"scale": "dynamic"}, ValueError, "k_scale: expected a scale per token .*, got None"),
        ({"k_scale": torch.ones(2), "scale": "dynamic"}, ValueError, "k_scale: expected a scale"),
        ({"k_scale": torch.ones(3)}, ValueError, r"k_scale: expected shape \[\] or \[Hk=2\] or"),
        ({"v_scale": torch.ones(2).half()}, TypeError, "v_scale: expected torch.float32, got"),
        ({"v_scale": "1"}, TypeError, "v_scale: expected None, a number or a tensor, got '1'"),
        ({"cache_dtype": torch.half}, ValueError, "cache_dtype: expected None or torch.int8 or"),
        ({"cache_dtype": torch.float8_e5m2}, TypeError, "k_cache: expected torch.uint8 or .*e5m2"),
    ],
)
def test_wrong_scales(change, error, message):
    with pytest.raises(error, match=f"^{message}"):
        specattn.write_kv(**eight_bit_write(torch.int8) | change)


def test_only_caches_of_8_bits_have_scales():
    arguments = make_write().arguments()
    with pytest.raises(ValueError, match=r"^k_scale: expected None for a cache of torch.float32"):
        specattn.write_kv(**arguments, k_scale=1.0)
    with pytest.raises(TypeError, match=r"^k_cache: expected 8 bits for dynamic scales, got"):
        specattn.write_kv(**arguments, scale="dynamic")
