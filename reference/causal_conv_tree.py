"""A short causal convolution over a tree of tokens: each sees its own last ancestors."""

import torch
import torch.nn.functional as F

from ._attention import accumulation_dtype
from ._ragged import by_request

_ACTIVATIONS = {None: lambda x: x, "silu": F.silu}


@by_request
def causal_conv_tree(
    x,
    weight,
    bias,
    conv_state,
    parents=None,
    activation=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
):
    """Return act(bias + sum over i of weight[:, K - 1 - i] times the i-th ancestor), [B, T, C].

    x [B, T, C]; weight [C, K]; bias [C] or None; conv_state [B, K - 1, C], the inputs in front of
    the tree, the newest last; parents [B or 1, T], -1 behind the state, None a chain. A node is its
    own ancestor number 0. `cu_seqlens_q` makes rows ragged, as `by_request` says.
    """
    dtype, (batch, rows, _), taps = accumulation_dtype(x.dtype), x.shape, weight.shape[1]
    if parents is None:
        parents = torch.arange(-1, rows - 1, device=x.device)[None]
    # One row of inputs per request: the state, then the tree; above a place lies its parent's.
    inputs = torch.cat([conv_state, x], 1).to(dtype)
    kept = torch.arange(-1, taps - 2, device=x.device).clamp(min=0).expand(batch, -1)
    above = torch.cat([kept, (parents + taps - 1).expand(batch, -1)], 1)
    place = torch.arange(taps - 1, taps - 1 + rows, device=x.device).expand(batch, -1)
    out = torch.zeros_like(x, dtype=dtype)
    for tap in range(taps - 1, -1, -1):
        one = inputs.gather(1, place[..., None].expand(-1, -1, x.shape[2]))
        out += one * weight[:, tap].to(dtype)
        place = above.gather(1, place)
    if bias is not None:
        out += bias.to(dtype)
    return _ACTIVATIONS[activation](out).to(x.dtype)
