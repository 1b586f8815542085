"""What stands between a layer's products and attentions in C++, against float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specattn.reference._eight_bits import EIGHT_BITS, dynamic_scale, quantised
from torch.nn import functional

from specattn import _cpu
from specattn.blocks import TORCH, Gates, Projection
from specattn.blocks.kernels import Kernels, Memory
from tests.cases import assert_accurate
from tests.cpu import calls
from tests.cpu.tensors import apart, normal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GATES = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}
CACHE = ("k_cache", "v_cache", "k_scale", "v_scale")
EPS = 1e-5
LUCK = 3e-6  # what torch may hit in sums of a few numbers of size one
per_isa = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 131])
def test_embed(isa, dtype, width):
    weight, room = normal(0, (50, width), (16, width), dtype=dtype)
    tokens = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(1))
    tokens[0, 3], tokens[2, 6] = 0, 49
    for rows, table in [(tokens[:, 3:7], weight), (tokens[:, 3:4], apart(weight))]:
        out = apart(room[: rows.numel()].fill_(torch.nan))
        _cpu.embed(rows, table, out, 2)
        assert torch.equal(out, weight[rows.flatten()])


@pytest.mark.parametrize("token", [-1, 50, 2**40])
def test_embed_of_no_token(isa, token):
    tokens, weight, out = torch.zeros(2, 3, dtype=torch.int64), torch.ones(50, 8), torch.zeros(6, 8)
    tokens[1, 2] = token
    with pytest.raises(IndexError, match="tokens: expected values from 0 to 49"):
        _cpu.embed(tokens, weight, out, 1)
    assert not out.any()


@per_isa
@given(
    rows=st.integers(1, 9),
    width=st.sampled_from([1, 8, 16, 33, 256, 4096]) | st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    in_place=st.booleans(),
)
def test_rms_norm(isa, rows, width, dtype, strided, in_place):
    x, weight = normal(rows + width, (rows, width), (width,), dtype=dtype)
    exact = functional.rms_norm(x.double(), (width,), weight.double(), EPS)
    rough = functional.rms_norm(x, (width,), weight, EPS)
    out = calls.poisoned(rows, width, dtype=dtype)
    if strided:
        x, out = apart(x), apart(out)
    if in_place:
        out = x
    _cpu.rms_norm(x, weight, EPS, out, 2)
    assert_accurate(out, exact, rough, atol=LUCK)


def test_rms_norm_of_small_numbers_is_held_by_eps(isa):
    x, out = torch.full((1, 40), 1e-4), calls.poisoned(1, 40)
    _cpu.rms_norm(x, torch.ones(40), 1e-6, out, 1)
    exact = x.double() / (1e-8 + 1e-6) ** 0.5
    assert torch.allclose(out.double(), exact, rtol=1e-6, atol=0)


def test_vectors_must_be_contiguous(isa):
    every_second = torch.ones(16)[::2]
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        _cpu.rms_norm(x, every_second, EPS, x, 1)
    with pytest.raises(ValueError, match="biases must be contiguous"):
        _cpu.linear_parts(x, [weight], [torch.ones(6)[::2]], None, None, calls.poisoned(2, 3), 1)
    for name, strided in [
        ("q_norm", torch.ones(32)[::2]),
        ("k_norm", torch.ones(32)[::2]),
        ("prefix", torch.zeros(4, dtype=torch.int32)[::2]),
    ]:
        with pytest.raises(ValueError, match=f"{name} must be contiguous"):
            rotate(problem(**{name: strided}))


def problem(
    batch=2, rows=3, q_heads=4, kv_heads=2, head_dim=16, half=8, dtype=torch.float32, **changes
):
    """Return the arguments of rotate_heads by name, in the kernel's order; there is no cache."""
    shape = (batch, rows, q_heads + 2 * kv_heads, head_dim)
    heads, q_norm, k_norm = normal(rows, shape, (head_dim,), (head_dim,), dtype=dtype)
    angles = torch.outer(torch.arange(40.0), 10 ** -torch.linspace(0, 3, half))
    prefix = torch.tensor([30, 0, 17][:batch], dtype=torch.int32)
    arguments = {"heads": heads, "q_heads": q_heads, "q_norm": q_norm, "k_norm": k_norm}
    arguments |= {"eps": EPS, "cos": angles.cos(), "sin": angles.sin(), "prefix": prefix}
    arguments |= dict.fromkeys(("depths", *CACHE, "first_slot"))
    return arguments | changes


def caches_of_8_bits(stored, capacity=36):
    """Return caches of 255, which is NaN, as decoding keeps them: each row before its scale."""
    memory = torch.full((2, 2, capacity, 2, 16 + 4), 255, dtype=torch.uint8)
    rows, scales = memory.view(stored)[..., :16], memory.view(torch.float32)[..., -1]
    return memory, dict(zip(CACHE, (*rows, *scales), strict=True))


def caches(arguments, capacity=36):
    """Return caches of sevens, whose heads lie further apart than their tokens."""
    batch, _, heads, head_dim = arguments["heads"].shape
    kv_heads = (heads - arguments["q_heads"]) // 2
    memory = arguments["heads"].new_full((2, batch, kv_heads, capacity, head_dim), 7)
    k_cache, v_cache = memory.transpose(2, 3)
    return {"k_cache": k_cache, "v_cache": v_cache}


def rotate(arguments, threads=1):
    _cpu.rotate_heads(*arguments.values(), threads)


def positions_of(arguments):
    depths = arguments["depths"]
    if depths is None:
        depths = torch.arange(arguments["heads"].shape[1])
    return (arguments["prefix"][:, None] + depths).long()


def turned(x, cos, sin):
    """Turn the first dimensions as transformers' apply_rotary_pos_emb does; the others stay."""
    first, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    a, b = first.chunk(2, -1)
    swapped, twice = torch.cat([-b, a], -1), [torch.cat([t, t], -1) for t in (cos, sin)]
    return torch.cat([first * twice[0] + swapped * twice[1], rest], -1)


def formula(arguments, dtype):
    """Return normed and rotated queries and keys, computed in `dtype`."""
    heads, q_heads, q_norm, k_norm = [arguments[n] for n in list(arguments)[:4]]
    kv_heads = (heads.shape[2] - q_heads) // 2
    cos, sin = [arguments[n][positions_of(arguments)][:, :, None].to(dtype) for n in ("cos", "sin")]
    parts = []
    queries, keys, _ = heads.to(dtype).split([q_heads, kv_heads, kv_heads], 2)
    for x, norm in ((queries, q_norm), (keys, k_norm)):
        if norm is not None:
            x = functional.rms_norm(x, norm.shape, norm.to(dtype), EPS)
        parts.append(turned(x, cos, sin))
    return torch.cat(parts, 2)


def apart_4d(x):
    room = x.new_full([n + 1 for n in x.shape], torch.nan)
    room[1:, 1:, 1:, 1:] = x
    return room[1:, 1:, 1:, 1:]


@per_isa
@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 6),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]),
    head_dim=st.sampled_from([8, 16, 24, 40, 64, 128]),
    half=st.integers(0, 64),
    dtype=st.sampled_from(DTYPES),
    normed=st.tuples(st.booleans(), st.booleans()),
    depths=st.sampled_from([None, "own", "shared"]),
    strided=st.booleans(),
)
def test_rotate_heads(isa, batch, rows, heads, head_dim, half, dtype, normed, depths, strided):
    half = min(half, head_dim // 2)
    arguments = problem(batch, rows, *heads, head_dim, half, dtype)
    for name, wanted in zip(("q_norm", "k_norm"), normed, strict=True):
        arguments[name] = arguments[name] if wanted else None
    if depths:
        shape = (batch if depths == "own" else 1, rows)
        generator = torch.Generator().manual_seed(half)
        arguments["depths"] = torch.randint(9, shape, generator=generator, dtype=torch.int32)
    exact, rough = formula(arguments, torch.float64), formula(arguments, dtype)
    values = arguments["heads"][:, :, sum(heads) :].clone()
    if strided:
        arguments["heads"] = apart_4d(arguments["heads"])
    rotate(arguments, 2)
    # In a few numbers torch may be lucky by one rounding of the largest.
    luck = max(LUCK, torch.finfo(dtype).eps / 2 * exact.abs().max().item())
    assert_accurate(arguments["heads"][:, :, : sum(heads)], exact, rough, atol=luck)
    assert torch.equal(arguments["heads"][:, :, sum(heads) :], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)
def test_keys_and_values_are_stored_in_8_bits(isa, dtype, stored):
    arguments = problem(dtype=dtype)
    arguments["heads"][0, 1] *= 1e-9  # the least scale
    arguments["heads"][1, 2, 6:] = torch.tensor([[torch.inf], [torch.nan]])
    memory, given = caches_of_8_bits(stored)
    rotate(arguments | given)
    for b, prefix in enumerate(arguments["prefix"].tolist()):
        slots = slice(prefix, prefix + 3)
        for half, first in enumerate((4, 6)):
            heads = arguments["heads"][b, :, first : first + 2]
            scale = given[CACHE[2 + half]][b, slots]
            expected = dynamic_scale(heads, stored)
            assert torch.equal(scale.nan_to_num(7), expected.nan_to_num(7))
            found = given[CACHE[half]][b, slots].float().nan_to_num(7)
            assert torch.equal(found, quantised(heads, expected, stored).float().nan_to_num(7))
            memory[half, b, slots] = 255
    assert (memory == 255).all()


def test_a_cache_of_8_bits_needs_its_scales_and_no_other_has_any():
    _, given = caches_of_8_bits(torch.int8)
    for name in CACHE[2:]:
        with pytest.raises(ValueError, match=f"{name} must be .*36, 2. of float32, got"):
            rotate(problem(**given | {name: None}))
        arguments = problem()
        wrong = caches(arguments) | {name: given[name]}
        with pytest.raises(ValueError, match=f"{name} must be None for a cache of more than 8"):
            rotate(arguments | wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_slot", [None, 0, 33])
@pytest.mark.parametrize("depths", [None, [[0, 1, 1]]])
def test_keys_and_values_are_stored(isa, dtype, first_slot, depths):
    arguments = problem(dtype=dtype, first_slot=first_slot)
    if depths:
        arguments["depths"] = torch.tensor(depths, dtype=torch.int32)
    arguments |= caches(arguments)
    exact, rough = formula(arguments, torch.float64), formula(arguments, dtype)
    values = arguments["heads"][:, :, 6:].clone()
    rotate(arguments)
    for b, prefix in enumerate(arguments["prefix"].tolist()):
        start = prefix if first_slot is None else first_slot
        slots = slice(start, start + 3)
        stored = arguments["k_cache"][b, slots]
        assert_accurate(stored, exact[b, :, 4:], rough[b, :, 4:], atol=LUCK)
        assert torch.equal(stored, arguments["heads"][b, :, 4:6])
        assert torch.equal(arguments["v_cache"][b, slots], values[b])
        for cache in (arguments["k_cache"], arguments["v_cache"]):
            cache[b, slots] = 7
            assert (cache[b] == 7).all()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("stored", "change", "message"),
    [
        (True, {"prefix": int32(0, 34)}, "prefix: expected values from 0 to 33, got 34"),
        (True, {"prefix": int32(0, -1)}, "prefix"),
        (True, {"first_slot": 34}, "first_slot: expected values from 0 to 33, got 34"),
        (True, {"first_slot": -1}, "first_slot"),
        (True, {"prefix": int32(0, 38), "first_slot": 0}, "positions"),
        (False, {"prefix": int32(0, 38)}, "positions: expected values from 0 to 39, got 40"),
        (False, {"prefix": int32(0, -1)}, "positions"),
        (False, {"prefix": int32(0, 2**31 - 1)}, "positions"),
        (False, {"depths": int32(0, 1, -18)[None]}, "positions"),
        (False, {"depths": int32(0, 1, 10)[None]}, "positions: .* got 40"),
    ],
)
def test_rotation_outside(isa, stored, change, message):
    arguments = problem()
    if stored:
        arguments |= caches(arguments)
    arguments |= change
    heads = arguments["heads"].clone()
    with pytest.raises(IndexError, match=message):
        rotate(arguments)
    assert torch.equal(arguments["heads"], heads)
    if stored:
        assert (arguments["k_cache"] == 7).all()
        assert (arguments["v_cache"] == 7).all()


def test_a_cache_of_no_tokens_has_no_slot(isa):
    arguments = problem()
    with pytest.raises(IndexError, match="prefix"):
        rotate(arguments | caches(arguments, capacity=0))


def test_wrong_heads(isa):
    for change, message in [
        ({"q_heads": 5}, "heads must be of queries, keys, values"),
        ({"q_heads": 10}, "heads must be of queries, keys, values"),
        ({"q_norm": torch.ones(8)}, "q_norm must be"),
        ({"sin": torch.ones(40, 7)}, "sin must be"),
        ({"sin": torch.ones(40, 9)[:, :8]}, "sin must have the strides of cos"),
        ({"cos": torch.ones(40, 9), "sin": torch.ones(40, 9)}, "cos must turn at most a whole"),
        ({"depths": int32(0, 1)[None]}, "depths must be"),
        ({"k_cache": torch.zeros(2, 9, 2, 16)}, "v_cache must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            rotate(problem() | change)


@per_isa
@given(
    rows=st.integers(1, 20),
    outputs=st.integers(1, 120),
    depth=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    gate=st.sampled_from(list(GATES)),
    biased=st.booleans(),
    added=st.booleans(),
    wide=st.booleans(),
)
def test_gated_parts(isa, rows, outputs, depth, dtype, gate, biased, added, wide):
    shapes = [(rows, depth), *[(outputs, depth)] * 2, *[(outputs,)] * 2, (rows, outputs)]
    x, *weights, bias, up_bias, residual = normal(depth, *shapes, dtype=dtype)
    weights = [w * depth**-0.5 for w in weights]
    biases = [bias, up_bias] if biased else [None, None]
    out_dtype = torch.float32 if wide else dtype
    residual = residual.to(out_dtype) if added else None

    def product(i, to):
        return functional.linear(
            x.to(to), weights[i].to(to), None if biases[i] is None else biases[i].to(to)
        )

    exact, rough = [
        GATES[gate](product(0, to)) * product(1, to) + (residual.to(to) if added else 0)
        for to in (torch.float64, out_dtype)
    ]
    out = calls.poisoned(rows, outputs, dtype=out_dtype)
    _cpu.linear_parts(x, weights, biases, gate, residual, out, 2)
    assert_accurate(out, exact, rough, atol=LUCK)


def test_gates_need_two_weights_of_one_shape(isa):
    x, weight, out = torch.ones(2, 8), torch.ones(3, 8), torch.empty(2, 3)
    for weights in ([weight], [weight] * 3, [weight, weight[:2]]):
        with pytest.raises(ValueError, match="two of one shape"):
            _cpu.linear_parts(x, weights, [None] * len(weights), "silu", None, out, 1)
    with pytest.raises(
        ValueError, match="activation must be silu, gelu, gelu_tanh or sigmoid, got relu"
    ):
        _cpu.linear_parts(x, [weight] * 2, [None] * 2, "relu", None, out, 1)
    with pytest.raises(ValueError, match="out must be"):
        _cpu.linear_parts(x, [weight] * 2, [None] * 2, "silu", None, torch.empty(2, 6), 1)


@per_isa
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 100),
    dtype=st.sampled_from(DTYPES),
    gate=st.sampled_from(list(GATES)),
    widened=st.booleans(),
    in_place=st.booleans(),
)
def test_gate(isa, rows, width, dtype, gate, widened, in_place):
    read = torch.float32 if widened else dtype
    first, second = normal(width, *[(rows, width)] * 2, dtype=read)
    exact = GATES[gate](first.double()) * second.double()
    rough = (GATES[gate](first) * second).to(dtype)
    out = first if in_place and read == dtype else apart(calls.poisoned(rows, width, dtype=dtype))
    _cpu.gate(first, apart(second), gate, out, 2)
    assert_accurate(out, exact, rough, atol=LUCK)


@per_isa
@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    most=st.sampled_from([1.0, 2.0]),
    seed=st.integers(0, 2**16),
)
def test_gates_of_a_state(isa, rows, heads, dtype, most, seed):
    """`Kernels.gates` does what `Ops.gates` does, in parts of wider rows, at any size of them."""
    sizes = (1, rows, 3 * heads), (heads,), (heads,)
    products, rate, bias = normal(seed, *sizes, dtype=torch.float32)
    products = (products * 20).to(dtype)
    b, _, a = products.split(heads, -1)
    gates = Gates(-rate.abs(), bias, most)
    found = Kernels(Memory()).gates(b, a, gates)
    wide = Gates(*(x.double() for x in gates[:2]), most)
    for one, exact, rough in zip(
        found, TORCH.gates(b.double(), a.double(), wide), TORCH.gates(b, a, gates), strict=True
    ):
        assert one.dtype == torch.float32
        assert_accurate(one, exact, rough, atol=LUCK)


def test_gates_have_the_rows_of_their_products(isa):
    x, one = torch.ones(2, 8), torch.ones(8)
    for arguments, message in [
        ((x, x[:1], one, one, 1.0, x, x), "a must be"),
        ((x, x, one[:7], one, 1.0, x, x), "rate must be"),
        ((x, x, one, one, 1.0, x, x.half()), "beta must be"),
        ((x.double(), x.double(), one, one, 1.0, x, x), "b must be float32, bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            _cpu.delta_gates(*arguments, 1)


def test_what_is_gated_has_one_shape_and_type(isa):
    x, other = torch.ones(2, 8), torch.ones(2, 7)
    for arguments, message in [
        ((x, other, "silu", x), "second must be"),
        ((x, x, "silu", other), "out must be"),
        ((x.half(), x.half(), "silu", x), "out must be"),
        ((x, x, "relu", x), "activation must be silu, gelu, gelu_tanh or sigmoid, got relu"),
    ]:
        with pytest.raises(ValueError, match=message):
            _cpu.gate(*arguments, 1)


@per_isa
@given(
    rows=st.integers(1, 20),
    outputs=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    depth=st.integers(1, 90),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from([None, "gate", "activation"]),
    biased=st.booleans(),
    added=st.booleans(),
    keep=st.booleans(),
)
def test_products_by_torch(isa, rows, outputs, depth, dtype, how, biased, added, keep):
    """`Kernels.linear` does what `Ops.linear` does, in float32 where that is faster."""
    outputs = {"gate": outputs[:1] * 2, "activation": outputs[:1]}.get(how, outputs)
    out_width = outputs[0] if how == "gate" else sum(outputs)
    shapes = [(1, rows, depth), (1, rows, out_width)]
    shapes += [shape for n in outputs for shape in ((n, depth), (n,))]
    x, residual, *layers = normal(depth, *shapes, dtype=dtype)
    layers = [(w * depth**-0.5, b if biased else None) for w, b in zip(*[iter(layers)] * 2)]  # noqa: B905
    options = {how: "silu"} if how else {}

    def product(ops, to):
        projections = [Projection(w.to(to), b if b is None else b.to(to)) for w, b in layers]
        own = residual.to(to).clone() if added else None
        out = ops.linear(x.to(to), *projections, residual=own, keep=keep, **options)
        return out, own

    exact, rough = product(TORCH, torch.float64)[0], product(TORCH, dtype)[0]
    out, sum_ = product(Kernels(Memory()), dtype)
    assert out.dtype == dtype
    assert_accurate(out, exact, rough, atol=LUCK)
    if added:
        assert (out.data_ptr() == sum_.data_ptr()) == (not keep)
