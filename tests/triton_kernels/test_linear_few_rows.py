"""`linear_few_rows` on the Triton kernel: every option against float64, and who may be where."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels.linear_few_rows import linear_parts

import specattn
from specattn.quantised import quantise
from tests.cpu.tensors import apart
from tests.linear import ACTIVATIONS, DTYPES, check, layer

from .conftest import DEVICE, interpreted, mostly


def multiplied(x, weight, bias=None, up=None, activation=None, residual=None, **out):
    """Return the result of the operator on the device that is tested."""
    given_ones = (x, weight, bias, up, residual)
    x, weight, bias, up, residual = (None if t is None else t.to(DEVICE) for t in given_ones)
    options = {"up": up, "activation": activation, "residual": residual}
    return specattn.linear_few_rows(x, weight, bias, **options, **out).cpu()


@interpreted(60)
@given(
    rows=st.integers(1, 64),
    outputs=st.integers(1, 70),
    depth=st.sampled_from([1, 16, 256, 320, 1001]) | st.integers(1, 400),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    given_ones=st.tuples(*[st.booleans()] * 4),
    seed=st.integers(0, 2**16),
)
def test_against_float64(rows, outputs, depth, dtype, activation, given_ones, seed):
    x, weight, bias, up, residual = layer(rows, outputs, depth, dtype, seed)
    strided, *others = given_ones
    if strided:
        x, weight, up, residual = (apart(t) for t in (x, weight, up, residual))
    bias, up, residual = (
        t if wanted else None for t, wanted in zip((bias, up, residual), others, strict=True)
    )
    arguments = x, weight, bias, up, activation, residual
    check(arguments, multiplied(*arguments))


@pytest.mark.parametrize("dtype", mostly(*DTYPES[::-1]), ids=str)
def test_what_is_added_may_be_the_result(dtype):
    x, weight, bias, up, residual = (t.to(DEVICE) for t in layer(5, 70, 96, dtype))
    expected = multiplied(x, weight, bias, up, "silu", residual)
    room = torch.full((5, 90), torch.nan, dtype=dtype, device=DEVICE)
    room[:, 9:79] = residual
    multiplied(x, weight, bias, up, "silu", room[:, 9:79], out=room[:, 9:79])
    assert torch.equal(room[:, 9:79].cpu(), expected)
    assert room[:, :9].isnan().all()
    assert room[:, 79:].isnan().all()


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("rows", mostly(40, 3))
def test_a_row_or_a_weight_that_is_no_number_stays_where_it_is(rows):
    x, weight, *_ = layer(rows, 40, 50, torch.bfloat16)
    clean = multiplied(x, weight)
    x[1, 3], weight[7, 49], weight[8] = torch.nan, torch.nan, torch.inf
    out = multiplied(x, weight)
    assert out[1].isnan().all()
    assert out[:, 7].isnan().all()
    assert not out[:, 8].isfinite().any()
    others = torch.ones(rows, 40, dtype=torch.bool)
    others[1], others[:, 7:9] = False, False
    assert torch.equal(out[others], clean[others])


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's words for these
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_everywhere(activation):
    ends = [0.0, -0.0, 1e-30, 90.0, -90.0, 1e4, -1e4, torch.inf, -torch.inf, torch.nan]
    x = torch.cat([torch.linspace(-14, 14, 118), torch.tensor(ends)]).view(64, 2, 1)
    for part in x.unbind(1):
        out = multiplied(part, torch.ones(1, 1), activation=activation)
        with specattn.use_backend("reference"):
            exact = multiplied(part.double(), torch.ones(1, 1).double(), activation=activation)
        assert torch.allclose(out.double(), exact, rtol=2e-6, atol=1e-6, equal_nan=True)


def test_nothing_at_all():
    """The public function refuses empty tensors; the operator, which checks no shapes, has none."""
    x, weight, out = (torch.empty(*size, device=DEVICE) for size in ((0, 16), (24, 16), (0, 24)))
    torch.ops.specattn.linear_few_rows(x, weight, *[None] * 8, out)
    assert out.shape == (0, 24)


@pytest.mark.parametrize("rows", mostly(5, 40))
@pytest.mark.parametrize("more", mostly(True, False))
def test_weights_side_by_side(rows, more):
    """In one launch, with the bits of each by itself, beside columns that are another's."""
    x, weight, bias, _, residual = (t.to(DEVICE) for t in layer(rows, 70, 96, torch.bfloat16))
    weights, biases = weight.split([40, 24, 6]), bias.split([40, 24, 6])
    biases = biases if more else [None] * 3
    residual = residual if more else None
    room = torch.full((rows, 72), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    parts = [(*part, None, None) for part in zip(weights, biases, strict=True)]
    linear_parts(x, parts, residual, room[:, 1:71])
    expected = multiplied(x, weight, bias if more else None, residual=residual)
    assert torch.equal(room[:, 1:71].cpu(), expected)
    assert room[:, ::71].isnan().all()


def test_three_dimensions():
    x, weight, _, _, residual = layer(6, 24, 16, torch.float32)
    expected = multiplied(x, weight, residual=residual)
    out = multiplied(x.view(2, 3, 16), weight, residual=residual.view(2, 3, 24))
    assert torch.equal(out, expected.view(2, 3, 24))


def test_the_reference_serves_the_rest():
    few = quantise(torch.randn(8, 64), bits=4)
    x, codes, scale = torch.randn(3, 64), torch.zeros(8, 66, dtype=torch.uint8), few.scale
    codes[:, :64] = few.codes
    x, codes, scale = (t.to(DEVICE) for t in (x, codes[:, :64], scale))
    with pytest.raises(RuntimeError, match="rows begin beside multiples of four bytes"):
        specattn.linear_few_rows(x, codes, scale=scale)
    with specattn.use_backend(None):
        out = specattn.linear_few_rows(x, codes, scale=scale)
    assert torch.allclose(out.cpu(), x.cpu() @ few.dequantised(torch.float32).T, atol=1e-5)
    many, weight = torch.randn(65, 16, device=DEVICE), torch.randn(8, 16, device=DEVICE)
    with pytest.raises(RuntimeError, match="does not serve 65 rows, more than 64"):
        torch.ops.specattn.linear_few_rows(
            many, weight, *[None] * 8, torch.empty(65, 8, device=DEVICE)
        )
