"""A linear layer, its bias, activation, gate and residual, in torch's own products."""

import torch
import torch.nn.functional as F

from ._codes import dequantised

_ACTIVATIONS = {
    None: lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def linear_few_rows(
    x,
    weight,
    bias=None,
    up=None,
    activation=None,
    residual=None,
    scale=None,
    zero=None,
    up_scale=None,
    up_zero=None,
):
    """Return ``act(x weight^T + bias) * (x up^T) + residual``; x is [.., K], weights are [N, K].

    With a `scale` weights are codes, and everything is computed in float32 at least.
    """
    if scale is None:
        result = _ACTIVATIONS[activation](F.linear(x, weight, bias))
        if up is not None:
            result = result * F.linear(x, up)
        return result if residual is None else result + residual
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = [t if t is None else t.to(dtype) for t in (x, bias, residual)]
    weight = dequantised(weight, scale, zero, x.shape[-1], dtype)
    if up is not None:
        up = dequantised(up, up_scale, up_zero, x.shape[-1], dtype)
    return linear_few_rows(wide[0], weight, wide[1], up, activation, wide[2]).to(x.dtype)
