"""What `linear_few_rows` refuses and where it writes; its results are held in `tests/cpu`
and `tests/triton_kernels`."""

import pytest
import torch
from specattn.reference._codes import in_tiles, to_tiles

import specattn
from specattn.quantised import QuantisedWeight, quantise, quantise_float8


def layer(*leading):
    return torch.randn(*leading, 16), torch.randn(24, 16), torch.randn(*leading, 24)


def test_more_rows_than_it_is_made_for():
    x, weight, _ = layer(5, 13)
    with pytest.raises(ValueError, match="^x: expected at most 64 rows in all, got 65"):
        specattn.linear_few_rows(x, weight)


def test_an_activation_that_it_does_not_know():
    x, weight, _ = layer(3)
    with pytest.raises(ValueError, match="^activation: expected one of .*'silu'.*, got 'relu'"):
        specattn.linear_few_rows(x, weight, activation="relu")


@pytest.mark.parametrize("name", ["residual", "out"])
def test_shapes_of_results(name):
    x, weight, residual = layer(2, 3)
    for wrong in (residual[:1], residual[..., :23], residual.flatten(0, 1)):
        with pytest.raises(ValueError, match=rf"^{name}: expected shape \[B=2, T=3, N=24\], got"):
            specattn.linear_few_rows(x, weight, **{name: wrong})
    with pytest.raises(TypeError, match=rf"^{name}: expected torch.float32 as x is torch.float32"):
        specattn.linear_few_rows(x, weight, **{name: residual.half()})


def test_results_are_written_in_place():
    x, weight, residual = layer(2, 3)
    expected = specattn.linear_few_rows(x, weight, residual=residual)
    room = torch.full((2, 3, 40), torch.nan)
    out = room[..., 8:32]
    assert specattn.linear_few_rows(x, weight, residual=residual, out=out) is out
    assert torch.equal(out, expected)
    assert room[..., :8].isnan().all()
    assert room[..., 32:].isnan().all()
    assert specattn.linear_few_rows(x, weight, residual=residual, out=residual) is residual
    assert torch.equal(residual, expected)


def test_results_that_no_stride_reaches():
    x, weight, _ = layer(2, 3)
    room = torch.empty(2, 4, 24)
    with pytest.raises(ValueError, match=r"^out.stride\(\): expected all rows one stride apart"):
        specattn.linear_few_rows(x, weight, out=room[:, :3])


def test_rows_anywhere():
    x, weight, residual = layer(2, 4)
    expected = specattn.linear_few_rows(x[:, :3].contiguous(), weight)
    assert torch.equal(specattn.linear_few_rows(x[:, :3], weight), expected)
    some = specattn.linear_few_rows(x[:, :3], weight, residual=residual[:, :3])
    assert torch.equal(some, expected + residual[:, :3])


def test_a_float64_layer_is_that_of_torch():
    x, weight, _ = (t.double() for t in layer(3))
    assert torch.equal(specattn.linear_few_rows(x, weight), x @ weight.T)


CODES = quantise(torch.randn(24, 192), bits=4)
BYTES = quantise(torch.randn(24, 192), bits=8, group=None)
FLOATS = quantise_float8(torch.randn(24, 192))
WHOLE = [quantise(torch.randn(32, 192) / 14, bits) for bits in (8, 4)]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": CODES.codes[:, :96]}, ValueError, r"^weight: expected shape \[N, packed=128\]"),
        ({"weight": BYTES.codes[:, :128]}, ValueError, r"^weight: expected shape \[N, K=192\]"),
        (
            {"weight": torch.randn(24, 192)},
            TypeError,
            "^weight: expected torch.int8 or .*, got torch.fl",
        ),
        ({"scale": torch.ones(24, 5)}, ValueError, "^scale: expected one group, or .*, got 5 gr"),
        ({"scale": torch.ones(24, 12)}, ValueError, "^scale: expected one group, or .*, got 12"),
        ({"scale": torch.ones(23, 3)}, ValueError, r"^scale: expected shape \[N=24, groups\], got"),
        (
            {"scale": CODES.scale.t().contiguous().t()},
            ValueError,
            r"^scale: expected .* last dimension, strides \[any, 1\], got strides \[1, 24\]",
        ),
        ({"scale": CODES.codes}, TypeError, "^scale: expected torch.float32 or .*, got torch.uint"),
        ({"scale": None}, TypeError, "^weight: expected torch.float32 as x is torch.float32, got"),
        (
            {"zero": torch.ones(24, 3)},
            TypeError,
            "^zero: expected torch.uint8.*, got torch.float32",
        ),
        (
            {"zero": CODES.codes[:, :1]},
            ValueError,
            r"^zero: expected shape \[N=24, groups=3\], got",
        ),
        ({"up": CODES.codes}, ValueError, "^up_scale: expected one beside `up`, got None"),
        ({"up_scale": CODES.scale}, ValueError, "^up_scale: expected one beside `up`, got "),
        (
            {"up": CODES.codes, "up_scale": CODES.scale.half()},
            TypeError,
            "^up_scale: expected torch.bfloat16 as scale, got torch.float16",
        ),
    ],
)
def test_codes_that_it_does_not_take(change, error, message):
    arguments = {"weight": CODES.codes, "scale": CODES.scale} | change
    with pytest.raises(error, match=message):
        specattn.linear_few_rows(torch.randn(3, 192), **arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": FLOATS.codes[:, :128]}, ValueError, r"^weight: expected shape \[N, K=192\]"),
        (
            {"scale": torch.ones(24, 3)},
            ValueError,
            "^scale: expected one group, or 2 of 128 floats each for K=192, got 3 groups",
        ),
        ({"scale": torch.ones(1, 1)}, ValueError, r"^scale: expected shape \[N=24, groups\], got"),
        (
            {"weight": FLOATS.codes.view(torch.uint8).view(torch.float8_e5m2)},
            TypeError,
            "^weight: expected torch.int8 or torch.uint8 or .*_e4m3fn or .*int32, got .*_e5m2",
        ),
        (
            {"zero": torch.zeros(24, 1).to(torch.float8_e4m3fn)},
            ValueError,
            "^zero: expected None beside floats of 8 bits, got a tensor",
        ),
        (
            {"up": BYTES.codes, "up_scale": BYTES.scale},
            TypeError,
            "^up: expected torch.float8_e4m3",
        ),
    ],
)
def test_floats_that_it_does_not_take(change, error, message):
    arguments = {"weight": FLOATS.codes, "scale": FLOATS.scale} | change
    with pytest.raises(error, match=message):
        specattn.linear_few_rows(torch.randn(3, 192), **arguments)


TILES = [QuantisedWeight(to_tiles(x.codes, 192), in_tiles(x.scale), None, 192) for x in WHOLE]


@pytest.mark.parametrize("few", TILES, ids=["8 bits", "4 bits"])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_tiles_are_multiplied_as_what_they_mean(few, backend):
    x = torch.randn(2, 3, 192)
    codes = {"scale": few.scale, "up": few.codes, "up_scale": few.scale}
    with specattn.use_backend(backend):
        out = specattn.linear_few_rows(x, few.codes, activation="silu", **codes)
    exact = x.double() @ few.dequantised(torch.float64).T
    exact = torch.nn.functional.silu(exact) * exact
    assert torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"weight": TILES[0].codes[:31]},
            ValueError,
            r"^scale: expected shape \[N=31, groups\], got",
        ),
        (
            {"weight": TILES[0].codes[:24], "scale": TILES[0].scale[:24]},
            ValueError,
            r"^weight: expected tiles of 16 rows, .* of K=192, got \[24, 48\]",
        ),
        ({"weight": TILES[0].codes[:, :40]}, ValueError, "^weight: expected tiles of 16 rows, "),
        (
            {"zero": torch.ones(32, 3, dtype=torch.uint8)},
            TypeError,
            "^zero: expected torch.int8 as codes in tiles are, got torch.uint8",
        ),
        (
            {"scale": TILES[0].scale.repeat(1, 2)[:, :3]},
            ValueError,
            "^scale: expected no gaps in tiles, got strides",
        ),
    ],
)
def test_tiles_that_it_does_not_take(change, error, message):
    arguments = {"weight": TILES[0].codes, "scale": TILES[0].scale} | change
    with pytest.raises(error, match=message):
        specattn.linear_few_rows(torch.randn(3, 192), **arguments)


def test_zero_points_without_a_scale():
    x, weight, _ = layer(3)
    with pytest.raises(ValueError, match="^zero: expected None without a scale"):
        specattn.linear_few_rows(x, weight, zero=weight)


@pytest.mark.parametrize("few", [CODES, BYTES, FLOATS], ids=["4 bits", "8 bits", "floats"])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_codes_are_multiplied_as_what_they_mean(few, backend):
    x = torch.randn(2, 3, 192)
    with specattn.use_backend(backend):
        out = specattn.linear_few_rows(x, few.codes, scale=few.scale)
    exact = x.double() @ few.dequantised(torch.float64).T
    assert torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-5)
