"""Linear layers of a few rows in C++ against float64, and the bits that do not depend on others."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import _cpu, reference
from tests.cpu import calls
from tests.cpu.tensors import apart
from tests.linear import ACTIVATIONS, DTYPES, check, layer

per_isa = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def threads():
    """Set the number of threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@per_isa
@given(
    rows=st.integers(1, 64),
    outputs=st.integers(1, 150),
    depth=st.sampled_from([1, 7, 16, 33, 100, 256, 1024, 2049]) | st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    given_ones=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 2**16),
)
def test_against_float64(isa, rows, outputs, depth, dtype, activation, given_ones, seed):
    x, weight, bias, up, residual = layer(rows, outputs, depth, dtype, seed)
    strided, *others = given_ones
    if strided:
        x, weight, up, residual = (apart(t) for t in (x, weight, up, residual))
    optional = [
        t if wanted else None for t, wanted in zip((bias, up, residual), others, strict=True)
    ]
    arguments = [x, weight, *optional[:2], activation, optional[2]]
    check(arguments, calls.linear_few_rows(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_deep_sums(isa, dtype):
    x, weight, *_ = layer(9, 20, 14336, dtype)
    check([x, weight], calls.linear_few_rows(x, weight))


@per_isa
@given(
    rows=st.integers(1, 20),
    outputs=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    depth=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    wide=st.booleans(),
)
def test_parts_side_by_side(isa, rows, outputs, depth, dtype, biased, wide):
    layers = [layer(rows, n, depth, dtype, seed) for seed, n in enumerate(outputs)]
    x, weights = layers[0][0], [one[1] for one in layers]
    biases = [one[2] if biased else None for one in layers]
    out_dtype = torch.float32 if wide else dtype
    residual = torch.cat([one[4] for one in layers], 1).to(out_dtype)
    out = calls.poisoned(rows, sum(outputs), dtype=out_dtype)
    _cpu.linear_parts(x, weights, biases, None, residual, out, 2)
    single = []
    for weight, bias in zip(weights, biases, strict=True):
        one = calls.poisoned(rows, len(weight), dtype=torch.float32)
        _cpu.linear_parts(x, [weight], [bias], None, None, one, 1)
        single.append(one)
    assert torch.equal(out, (torch.cat(single, 1) + residual.float()).to(out_dtype))
    for weight, bias, one in zip(weights, biases, single, strict=True):
        check([x, weight, bias], one.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_may_be_the_result(isa, dtype):
    x, weight, bias, up, residual = layer(5, 70, 96, dtype)
    expected = calls.linear_few_rows(x, weight, bias, up, "silu", residual)
    calls.run("linear_few_rows", x, weight, bias, up, "silu", residual, *[None] * 4, residual)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [100, 256, 4100])
def test_bits_of_a_row_do_not_depend_on_the_others(isa, threads, dtype, depth):
    x, weight, bias, up, residual = layer(64, 75, depth, dtype)
    threads(2)
    whole = calls.linear_few_rows(x, weight, bias, up, "gelu", residual)
    for first, last in [(0, 1), (1, 3), (7, 10), (20, 24), (30, 37), (40, 48), (3, 16), (0, 33)]:
        for count in (1, 3):
            threads(count)
            rows = slice(first, last)
            some = calls.linear_few_rows(x[rows], weight, bias, up, "gelu", residual[rows])
            assert torch.equal(some, whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_no_number_and_no_end(isa, dtype, rows):
    x, weight, *_ = layer(rows, 40, 50, dtype)
    x[0, 3], weight[5], weight[7, 49], weight[8, 0] = torch.nan, 0, torch.nan, torch.inf
    x[rows - 1, 0] = 2 if rows > 1 else x[0, 0]
    out = calls.linear_few_rows(x, weight)
    assert out[0].isnan().all()
    assert out[:, 7].isnan().all()
    if rows > 1:
        assert (out[1:, 5] == 0).all()
        assert out[rows - 1, 8] == torch.inf
        assert out[1:].isnan().sum() == rows - 1
    x, weight[8, 0] = torch.zeros_like(x), torch.inf
    assert calls.linear_few_rows(x, weight)[:, 8].isnan().all()  # infinity times zero


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_their_ends(isa, activation):
    ends = [0.0, -0.0, 1e-30, 90.0, -90.0, -13.5, 13.5, 1e4, -1e4, torch.inf, -torch.inf, torch.nan]
    x = torch.tensor(ends)[:, None]
    out = calls.linear_few_rows(x, torch.ones(1, 1), None, None, activation)
    exact = reference.linear_few_rows(x.double(), torch.ones(1, 1).double(), None, None, activation)
    assert torch.allclose(out.double(), exact, rtol=1e-6, atol=1e-25, equal_nan=True)


def test_activations_everywhere(isa):
    x = torch.linspace(-14, 14, 4001)[:, None]
    for activation in ACTIVATIONS[1:]:
        arguments = [x.double(), torch.ones(1, 1).double(), None, None, activation]
        out = calls.linear_few_rows(x[:, :1], torch.ones(1, 1), None, None, activation)
        exact = reference.linear_few_rows(*arguments)
        assert ((out - exact).abs() <= 4e-7 * exact.abs() + 1e-9).all()


def test_wrong_arguments(isa):
    x, weight, bias, up, residual = layer(3, 8, 16, torch.float32)
    out = torch.empty(3, 8)
    for change, message in [
        ({"x": x.double()}, "x must be float32"),
        ({"weight": weight[:, :9].contiguous()}, "weight must be"),
        ({"weight": weight.half()}, "weight must be"),
        ({"bias": bias[:7]}, "bias must be"),
        ({"up": up[:7]}, "up must be"),
        ({"activation": "relu"}, "activation must be"),
        ({"residual": residual[:2]}, "residual must be"),
        ({"out": out[:, :7].contiguous()}, "out must be"),
    ]:
        arguments = {"x": x, "weight": weight, "bias": bias, "up": up, "activation": None}
        arguments |= {"residual": residual} | change
        given = arguments.pop("out", out)
        with pytest.raises(ValueError, match=message):
            calls.run("linear_few_rows", *arguments.values(), *[None] * 4, given)
    for weights, biases in [([], []), ([weight] * 4, [None] * 4), ([weight], [])]:
        with pytest.raises(ValueError, match="one to three tensors"):
            _cpu.linear_parts(x, weights, biases, None, None, out, 1)


@pytest.fixture
def many_rows(isa):
    """Skip code paths that leave products of many rows to torch."""
    if isa != "avx512_bf16":
        pytest.skip(f"{isa} leaves products of many rows to torch")


@per_isa
@given(
    rows=st.integers(1, 70),
    outputs=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    depth=st.sampled_from([2, 6, 8, 34, 1024, 4096, 4104, 8200])
    | st.integers(1, 300).map(lambda n: 2 * n),
    gated=st.booleans(),
    given_ones=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 2**16),
)
def test_many_rows_against_float64(many_rows, rows, outputs, depth, gated, given_ones, seed):
    outputs = [outputs[0]] * 2 if gated else outputs
    strided, biased, added, wide = given_ones
    layers = [layer(rows, n, depth, torch.bfloat16, seed + i) for i, n in enumerate(outputs)]
    x, weights = layers[0][0], [one[1] for one in layers]
    biases = [one[2] if biased else None for one in layers]
    dtype = torch.float32 if wide and not gated else torch.bfloat16
    residual = torch.cat([one[4] for one in layers], 1)[:, : outputs[0] if gated else None].to(
        dtype
    )
    if strided:
        x, residual, *weights = (apart(t) for t in (x, residual, *weights))
    out = calls.poisoned(*residual.shape, dtype=dtype)
    gate = "silu" if gated else None
    _cpu.linear_many_rows(x, weights, biases, gate, residual if added else None, out, 2)
    if gated and not biased:
        check([x, weights[0], None, weights[1], gate, residual if added else None], out)
    elif not gated:
        first = 0
        for weight, bias in zip(weights, biases, strict=True):
            part = slice(first, first := first + len(weight))
            some = [x, weight, bias, None, None, residual[:, part].bfloat16() if added else None]
            check(some, out[:, part].bfloat16())


def test_bits_of_many_rows_do_not_depend_on_the_others(many_rows):
    x, weight, bias, up, residual = layer(300, 100, 4104, torch.bfloat16)
    whole = calls.poisoned(300, 100, dtype=torch.bfloat16)
    _cpu.linear_many_rows(x, [weight, up], [bias, None], "silu", residual, whole, 2)
    for first, last in [(0, 1), (1, 3), (7, 10), (20, 37), (40, 168), (150, 300)]:
        for threads in (1, 3):
            some = calls.poisoned(last - first, 100, dtype=torch.bfloat16)
            rows = slice(first, last)
            read = x[rows], [weight, up], [bias, None], "silu", residual[rows]
            _cpu.linear_many_rows(*read, some, threads)
            assert torch.equal(some, whole[rows])


def test_many_rows_that_are_not_served(isa):
    x, weight, *_ = layer(3, 8, 16, torch.float32)
    call = _cpu.linear_many_rows
    with pytest.raises(ValueError, match="expected bfloat16 on the code path avx512_bf16"):
        call(x, [weight], [None], None, None, torch.empty(3, 8), 1)
    x, weight = x.bfloat16(), weight.bfloat16()
    odd = x[:, :15].contiguous(), [weight[:, :15].contiguous()], [None], None, None
    message = "x must have an even" if isa == "avx512_bf16" else f"got another type or {isa}"
    with pytest.raises(ValueError, match=message):
        call(*odd, torch.empty(3, 8, dtype=torch.bfloat16), 1)
