"""Linear layers by floats of 8 bits in C++, against float64 of exactly dequantised ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn import _cpu, reference
from tests.codes import FLOAT_FORMS, FLOATS, floats
from tests.cpu import calls
from tests.cpu.tensors import apart, normal
from tests.cpu.test_linear import per_isa, threads  # noqa: F401
from tests.linear import ACTIVATIONS, DTYPES, check


@per_isa
@given(
    rows=st.integers(1, 64),
    outputs=st.integers(1, 110),
    form=st.sampled_from(FLOAT_FORMS),
    dtype=st.sampled_from(DTYPES),
    scale_dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    given_ones=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 2**16),
)
def test_against_float64(
    isa, rows, outputs, form, dtype, scale_dtype, activation, given_ones, seed
):
    depth, groups = form
    x, bias, residual = normal(seed, (rows, depth), (outputs,), (rows, outputs), dtype=dtype)
    strided, biased, gated, added = given_ones
    weight, *rest = floats(outputs, depth, groups, scale_dtype, seed)
    up, *up_rest = floats(outputs, depth, groups, scale_dtype, seed + 1)
    if strided:
        x, residual, rest[0] = apart(x), apart(residual), apart(rest[0])
    if not gated:
        up, up_rest = None, [None, None]
    arguments = [x, weight, bias if biased else None, up, activation, residual if added else None]
    arguments += [*rest, *up_rest]
    check(arguments, calls.linear_few_rows(*arguments))


def test_every_code(isa):
    """Ones times each code in turn: numbers, which are exact in every type of x."""
    codes = FLOATS[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    for dtype in DTYPES:
        x = torch.zeros(1, 32, dtype=dtype)
        x[0, 5] = 1
        rest = (torch.ones(len(codes), 1), None)
        out = calls.linear_few_rows(x, codes, None, None, None, None, *rest)
        assert torch.equal(out[0], codes[:, 0].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "groups"), [(96, 1), (1024, 8), (2240, 18)])
def test_bits_of_a_row_do_not_depend_on_the_others(isa, threads, dtype, depth, groups):  # noqa: F811
    x, bias, residual = normal(3, (64, depth), (75,), (64, 75), dtype=dtype)
    weight, *rest = floats(75, depth, groups, torch.float32, 0)
    up, *up_rest = floats(75, depth, groups, torch.float32, 1)
    threads(2)
    rest += up_rest
    whole = calls.linear_few_rows(x, weight, bias, up, "gelu", residual, *rest)
    for first, last in [(0, 1), (1, 3), (7, 10), (20, 24), (30, 37), (40, 48), (3, 16), (0, 33)]:
        for count in (1, 3):
            threads(count)
            rows = slice(first, last)
            some = [x[rows], weight, bias, up, "gelu", residual[rows], *rest]
            assert torch.equal(calls.linear_few_rows(*some), whole[rows])


@pytest.mark.parametrize(("depth", "groups"), FLOAT_FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantised_as_the_reference_says(isa, depth, groups, dtype):
    coded = floats(7, depth, groups, torch.float32, 3)
    room = calls.poisoned(7, depth + 3, dtype=dtype)
    _cpu.dequantise(*coded, room[:, 1 : depth + 1], 2)
    wide = reference._codes.dequantised(*coded, depth, torch.float32)
    assert torch.equal(room[:, 1 : depth + 1], wide.to(dtype))
    assert room[:, [0, depth + 1, depth + 2]].isnan().all()


def test_wrong_arguments(isa):
    x, out = torch.ones(3, 192), torch.empty(3, 20)
    weight, scale, _ = floats(20, 192, 2, torch.float32, 0)
    zero = torch.zeros(20, 2).to(torch.float8_e4m3fn)
    for change, message in [
        ({"weight": weight[:, :96].contiguous()}, r"weight must be \[any, 192\] of float8_e4m3fn"),
        ({"scale": torch.ones(20, 3)}, "scale must be of one group, or of 128 floats along K each"),
        ({"zero": zero}, "zero must be None beside floats of 8 bits"),
        ({"up": torch.zeros(20, 192, dtype=torch.int8)}, "up must be .* of float8_e4m3fn"),
    ]:
        arguments = {"weight": weight, "bias": None, "up": weight, "activation": None}
        arguments |= {"residual": None, "scale": scale, "zero": None}
        arguments |= {"up_scale": scale, "up_zero": None} | change
        with pytest.raises(ValueError, match=message):
            calls.run("linear_few_rows", x, *arguments.values(), out)
