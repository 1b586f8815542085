"""The reference of a linear layer against sums written out."""

import math

import pytest
import torch

from specattn import reference

ACTIVATIONS = {
    None: lambda x: x,
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_every_part_of_the_formula(activation, gated):
    x, weight, up = (torch.randn(n, 5, dtype=torch.float64) for n in (3, 4, 4))
    bias, residual = torch.randn(4).double(), torch.randn(3, 4).double()
    out = reference.linear_few_rows(x, weight, bias, up if gated else None, activation, residual)
    for m in range(3):
        for n in range(4):
            value = sum(x[m, k].item() * weight[n, k].item() for k in range(5)) + bias[n].item()
            value = ACTIVATIONS[activation](value)
            if gated:
                value *= sum(x[m, k].item() * up[n, k].item() for k in range(5))
            assert out[m, n].item() == pytest.approx(value + residual[m, n].item(), abs=1e-12)
