"""A linear layer, its bias, activation, gate and residual, in torch's own products."""

import torch.nn.functional as F

_ACTIVATIONS = {
    None: lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def linear_few_rows(x, weight, bias=None, up=None, activation=None, residual=None):
    """Return ``act(x weight^T + bias) * (x up^T) + residual``; x is [.., K], weights are [N, K]."""
    result = _ACTIVATIONS[activation](F.linear(x, weight, bias))
    if up is not None:
        result = result * F.linear(x, up)
    return result if residual is None else result + residual
