"""`linear_few_rows` of integers and floats of 8 and 4 bits in Triton, against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels.linear_few_rows import linear_parts

import specattn
from specattn.quantised import pack_nibbles
from tests.codes import FLOAT_FORMS, FLOATS, apart_in_words, grouped_by_columns, weights
from tests.cpu.tensors import apart, normal
from tests.linear import ACTIVATIONS, DTYPES, check

from .conftest import DEVICE, WHOLE, interpreted, mostly

BF16 = torch.bfloat16

# K and groups: of every size that the kernel tells apart, and depths that end within a block.
FORMS = [(32, 1), (33, 1), (160, 5), (192, 3), (128, 1), (256, 2), (512, 2), (301, 1), (768, 1)]


def multiplied(x, weight, bias, up, activation, residual, scale, zero, up_scale, up_zero):
    """Return the result of the operator, which checks no layout, on the device that is tested."""
    out = torch.full((len(x), len(weight)), torch.nan, dtype=x.dtype, device=DEVICE)
    given_ones = (x, weight, bias, up, activation, residual, scale, zero, up_scale, up_zero)
    moved = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in given_ones]
    torch.ops.specattn.linear_few_rows(*moved, out)
    return out.cpu()


@interpreted(60)
@given(
    rows=st.integers(1, 64),
    outputs=st.integers(1, 70),
    form_and_bits=st.one_of(
        st.tuples(st.sampled_from(FORMS), st.sampled_from([8, 4])),
        st.tuples(st.sampled_from(FLOAT_FORMS), st.just("e4m3")),
    ),
    zeros=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    given_ones=st.tuples(*[st.booleans()] * 5),
    seed=st.integers(0, 2**16),
)
def test_against_float64(
    rows, outputs, form_and_bits, zeros, dtype, scale_dtype, activation, given_ones, seed
):
    (depth, groups), bits = form_and_bits
    x, bias, residual = normal(seed, (rows, depth), (outputs,), (rows, outputs), dtype=dtype)
    strided, columns, biased, gated, added = given_ones
    weight, *rest = weights(outputs, depth, groups, bits, zeros, scale_dtype, seed)
    up, *up_rest = weights(outputs, depth, groups, bits, zeros, scale_dtype, seed + 1)
    if strided:
        x, residual = apart(x), apart(residual)
        weight, up = apart_in_words(weight), apart_in_words(up)
    if columns:
        rest, up_rest = grouped_by_columns(rest), grouped_by_columns(up_rest)
    if not gated:
        up, up_rest = None, [None, None]
    arguments = [x, weight, bias if biased else None, up, activation, residual if added else None]
    arguments += [*rest, *up_rest]
    check(arguments, multiplied(*arguments))


@pytest.mark.parametrize(
    ("rows", "sizes", "bits", "groups", "zeros"),
    [
        (5, (40, 24, 8), 4, 3, True),
        *(
            pytest.param(*case, marks=WHOLE)
            for case in (
                (40, (40, 24, 6), 8, 3, True),
                (17, (33, 50), "e4m3", 2, False),
                (3, (2, 30), 4, 6, True),
            )
        ),
    ],
)
@pytest.mark.parametrize("more", mostly(True, False))
def test_weights_side_by_side(rows, sizes, bits, groups, zeros, more):
    """In one launch, with the bits of each by itself, beside columns that are another's."""
    x, bias, residual = normal(0, (rows, 192), (sum(sizes),), (rows, sum(sizes)), dtype=BF16)
    room = torch.full((rows, sum(sizes) + 2), torch.nan, dtype=BF16, device=DEVICE)
    parts, expected = [], []
    of_parts = bias.split(sizes), residual.split(sizes, 1)
    for seed, (some, added) in enumerate(zip(*of_parts, strict=True)):
        weight, *rest = weights(len(some), 192, groups, bits, zeros, BF16, seed)
        some, added, (scale, zero) = some if more else None, added if more else None, rest
        alone = multiplied(x, weight, some, None, None, added, *rest, None, None)
        expected.append(alone)
        scale, zero = grouped_by_columns((scale, zero))
        parts.append([None if t is None else t.to(DEVICE) for t in (weight, some, scale, zero)])
    linear_parts(x.to(DEVICE), parts, residual.to(DEVICE) if more else None, room[:, 1:-1])
    assert torch.equal(room[:, 1:-1].cpu(), torch.cat(expected, 1))
    assert room[:, [0, -1]].isnan().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("zeros", mostly(True, False))
def test_every_code_and_zero_point(bits, zeros):
    """Ones times each code in turn: integers, which are exact in every type of x."""
    count = 256 if bits == 8 else 16
    codes = torch.arange(count)[:, None].repeat(1, 32) - (128 if bits == 8 else 0)
    packed = codes.to(torch.int8) if bits == 8 else pack_nibbles(codes)
    for zero in (-128, -1, 0, 5, 127) if bits == 8 else (0, 8, 15):
        exact = codes[:, 0] - (zero if zeros else 8 if bits == 4 else 0)
        given_zero = torch.full((count, 1), zero, dtype=torch.int8 if bits == 8 else torch.uint8)
        for dtype in DTYPES:
            x = torch.zeros(1, 32, dtype=dtype)
            x[0, zero % 32] = 1
            rest = (torch.ones(count, 1), given_zero if zeros else None, None, None)
            assert torch.equal(multiplied(x, packed, *[None] * 4, *rest)[0], exact.to(dtype))


def test_every_float():
    """Ones times each float of 8 bits in turn: numbers, which are exact in every type of x."""
    codes = FLOATS[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    for dtype in DTYPES:
        x = torch.zeros(1, 32, dtype=dtype)
        x[0, 5] = 1
        rest = torch.ones(len(codes), 1), None, None, None
        out = multiplied(x, codes, *[None] * 4, *rest)
        assert torch.equal(out[0], codes[:, 0].to(dtype))


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("rows", mostly(3, 40))
@pytest.mark.parametrize("bits", [8, 4, "e4m3"])
def test_a_scale_that_is_no_number_is_seen(rows, bits):
    (x,) = normal(0, (rows, 384), dtype=torch.bfloat16)
    weight, scale, zero = weights(20, 384, 3, bits, True, torch.float32, 0)
    rest = (None, None)
    clean = multiplied(x, weight, *[None] * 4, scale, zero, *rest)
    scale[7, 1] = torch.nan
    out = multiplied(x, weight, *[None] * 4, scale, zero, *rest)
    assert out[:, 7].isnan().all()
    out[:, 7] = clean[:, 7]
    assert torch.equal(out, clean)


def test_the_public_function_takes_them():
    x = torch.randn(2, 3, 192, device=DEVICE)
    weight, scale, zero = (t.to(DEVICE) for t in weights(24, 192, 3, 4, True, torch.float32, 0))
    out = specattn.linear_few_rows(x, weight, scale=scale, zero=zero)
    with specattn.use_backend("reference"):
        wide = specattn.linear_few_rows(x, weight, scale=scale, zero=zero)
    assert torch.allclose(out, wide, atol=1e-5)
