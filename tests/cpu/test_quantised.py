"""Linear layers by weights of 8 and 4 bits in C++, against float64 of exactly dequantised ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.reference._codes import packed_bytes

from specattn import _cpu, reference
from specattn.quantised import pack_nibbles
from tests import covering
from tests.codes import weights
from tests.cpu import calls
from tests.cpu.tensors import apart, normal
from tests.cpu.test_linear import per_isa, threads  # noqa: F401
from tests.linear import ACTIVATIONS, DTYPES, check

# K and groups: of every size that kernels tell apart, and depths that end within a block.
FORMS = [
    (32, 1),
    (33, 1),
    (160, 5),
    (192, 3),
    (128, 1),
    (256, 2),
    (512, 2),
    (300, 1),
    (1024, 1),
    (2304, 18),
    (2240, 35),
    (4608, 36),
]


@per_isa
@given(
    rows=st.integers(1, 64),
    outputs=st.integers(1, 110),
    form=st.sampled_from(FORMS),
    bits=st.sampled_from([8, 4]),
    zeros=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    given_ones=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 2**16),
)
def test_against_float64(
    isa, rows, outputs, form, bits, zeros, dtype, scale_dtype, activation, given_ones, seed
):
    depth, groups = form
    x, bias, residual = normal(seed, (rows, depth), (outputs,), (rows, outputs), dtype=dtype)
    strided, biased, gated, added = given_ones
    weight, scale, zero = weights(outputs, depth, groups, bits, zeros, scale_dtype, seed)
    up, up_scale, up_zero = weights(outputs, depth, groups, bits, zeros, scale_dtype, seed + 1)
    if strided:
        x, residual, scale = apart(x), apart(residual), apart(scale)
        weight = torch.cat([weight, weight[:, :5]], 1)[:, : weight.shape[1]]
    if not gated:
        up = up_scale = up_zero = None
    arguments = [x, weight, bias if biased else None, up, activation, residual if added else None]
    arguments += [scale, zero, up_scale, up_zero]
    check(arguments, calls.linear_few_rows(*arguments))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_every_code_and_zero_point(isa, bits, zeros):
    """Ones times each code in turn: integers, which are exact in every type of x."""
    count = 256 if bits == 8 else 16
    codes = torch.arange(count)[:, None].repeat(1, 32) - (128 if bits == 8 else 0)
    for zero in range(-128, 128, 5) if bits == 8 else range(16):
        exact = codes[:, 0] - (zero if zeros else 8 if bits == 4 else 0)
        given_zero = torch.full((count, 1), zero, dtype=torch.int8 if bits == 8 else torch.uint8)
        packed = codes.to(torch.int8) if bits == 8 else pack_nibbles(codes)
        for dtype in DTYPES:
            x = torch.zeros(1, 32, dtype=dtype)
            x[0, zero % 32] = 1
            rest = (torch.ones(count, 1), given_zero if zeros else None)
            out = calls.linear_few_rows(x, packed, None, None, None, None, *rest)
            assert torch.equal(out[0], exact.to(dtype))


@covering.pairs("dtype, form, bits", DTYPES, [(96, 3), (1024, 16), (4608, 1)], [8, 4])
def test_bits_of_a_row_do_not_depend_on_the_others(isa, threads, dtype, form, bits):  # noqa: F811
    depth, groups = form
    x, bias, residual = normal(3, (64, depth), (75,), (64, 75), dtype=dtype)
    weight, *rest = weights(75, depth, groups, bits, True, torch.bfloat16, 0)
    up, *up_rest = weights(75, depth, groups, bits, True, torch.bfloat16, 1)
    threads(2)
    rest += up_rest
    whole = calls.linear_few_rows(x, weight, bias, up, "gelu", residual, *rest)
    for first, last in [(0, 1), (1, 3), (7, 10), (20, 24), (30, 37), (40, 48), (3, 16), (0, 33)]:
        for count in (1, 3):
            threads(count)
            rows = slice(first, last)
            some = [x[rows], weight, bias, up, "gelu", residual[rows], *rest]
            assert torch.equal(calls.linear_few_rows(*some), whole[rows])


@per_isa
@given(
    rows=st.integers(1, 20),
    outputs=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    bits=st.sampled_from([8, 4]),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
)
def test_parts_side_by_side(isa, rows, outputs, bits, dtype, wide):
    (x,) = normal(0, (rows, 192), dtype=dtype)
    parts = [weights(n, 192, 3, bits, n % 2, dtype, n) for n in outputs]
    out = calls.poisoned(rows, sum(outputs), dtype=torch.float32 if wide else dtype)
    _cpu.linear_parts(x, parts, [None] * len(parts), None, None, out, 2)
    single = [calls.linear_few_rows(x, p[0], None, None, None, None, *p[1:]) for p in parts]
    assert torch.equal(out.to(dtype), torch.cat(single, 1))


def test_scales_that_are_no_numbers_are_seen(isa):
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    weight, scale, _ = weights(20, 64, 2, 4, False, torch.float32, 0)
    scale[7, 1] = torch.nan
    out = calls.linear_few_rows(x, weight, None, None, None, None, scale)
    assert out[:, 7].isnan().all()
    assert out.isnan().sum() == 3


def test_wrong_arguments(isa):
    x = torch.ones(3, 192)
    out = torch.empty(3, 20)
    weight, scale, zero = weights(20, 192, 3, 4, True, torch.float32, 0)
    bytes_ = torch.zeros(20, 192, dtype=torch.int8)
    assert weight.shape[1] == packed_bytes(192) == 128
    for change, message in [
        ({"weight": weight[:, :96].contiguous()}, r"weight must be \[any, 128\] of uint8"),
        ({"weight": weight.int()}, "weight must be"),
        ({"weight": bytes_[:, :128].contiguous()}, r"weight must be \[any, 192\] of int8"),
        ({"scale": scale[:, :2].contiguous()}, "scale must have groups of 32, 64 or a multiple"),
        ({"scale": torch.ones(20, 12)}, "scale must have groups of 32, 64 or a multiple of 128"),
        ({"scale": scale[:19]}, r"scale must be \[20, 3\]"),
        ({"scale": scale.double()}, "scale must have 2 dimensions and be float32"),
        ({"zero": zero.to(torch.int8)}, "zero must be .* of uint8"),
        ({"zero": zero[:, :1].contiguous()}, r"zero must be \[20, 3\] of uint8"),
        ({"up": bytes_}, "up must be"),
        ({"up_scale": scale.half()}, "up_scale must be of one group and type"),
        ({"up_scale": None}, "up_scale must be given"),
        ({"scale": None, "zero": None}, "weight must be .* of float32"),
    ]:
        arguments = {"weight": weight, "bias": None, "up": weight, "activation": None}
        arguments |= {"residual": None, "scale": scale, "zero": zero}
        arguments |= {"up_scale": scale, "up_zero": zero} | change
        with pytest.raises(ValueError, match=message):
            calls.run("linear_few_rows", x, *arguments.values(), out)


@per_isa
@given(
    outputs=st.integers(1, 20),
    form=st.sampled_from(FORMS),
    bits=st.sampled_from([8, 4]),
    zeros=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_dequantised_as_the_reference_says(
    isa, outputs, form, bits, zeros, dtype, scale_dtype, seed
):
    depth, groups = form
    coded = weights(outputs, depth, groups, bits, zeros, scale_dtype, seed)
    room = calls.poisoned(outputs, depth + 3, dtype=dtype)
    _cpu.dequantise(*coded, room[:, 1 : depth + 1], 2)
    wide = reference._codes.dequantised(*coded, depth, torch.float32)
    assert torch.equal(room[:, 1 : depth + 1], wide.to(dtype))
    assert room[:, [0, depth + 1, depth + 2]].isnan().all()
