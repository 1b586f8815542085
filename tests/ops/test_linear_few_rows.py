"""What `linear_few_rows` refuses and where it writes; its results are held in `tests/cpu`."""

import pytest
import torch

import specattn


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


def test_the_triton_backend_takes_the_products_of_torch(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, weight, residual = layer(3)
    with specattn.use_backend("triton"):
        out = specattn.linear_few_rows(x, weight, residual=residual)
    assert torch.equal(out, torch.nn.functional.linear(x, weight) + residual)
