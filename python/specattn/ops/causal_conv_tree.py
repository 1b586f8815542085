"""A short causal convolution over a drafted tree, as layers with a state have it."""

from __future__ import annotations

from typing import Any

import torch

from ._check import check_option, check_tensors
from ._library import call, define
from ._ragged import ragged_rows
from .cost import Cost

MOST_TAPS = 8
ACTIVATIONS = (None, "silu")
_operator = define(
    "causal_conv_tree(Tensor x, Tensor weight, Tensor? bias, Tensor conv_state, Tensor? parents, "
    "str? activation, Tensor? cu_seqlens_q, SymInt? max_seqlen_q, Tensor(a!) out)"
)


def causal_conv_tree(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    parents: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve every channel along each node's own path.

    A node sees itself and its last K - 1 ancestors, and behind a root what `conv_state` has kept of
    the text. That is only read; `causal_conv_commit` moves it along the accepted path.

    Parameters
    ----------
    x : Tensor [B, T, C]
        float32, bfloat16 or float16; float64 on the reference. C is any.
    weight : Tensor [C, K]
        A depthwise `torch.nn.Conv1d`'s ``weight.squeeze(1)``, K from 2 to 8; dtype as `x`. The last
        column belongs to the node itself.
    bias : Tensor [C] or None
        dtype as `x`.
    conv_state : Tensor [B, K - 1, C]
        The inputs in front of the tree, the newest last; dtype as `x`.
    parents : Tensor [T], [1, T] or [B, T], int64, optional
        As `gated_delta_tree` takes them; None is a chain.
    activation : {None, "silu"}
        Of the sum.
    cu_seqlens_q : Tensor [B + 1], int32, optional
        Makes rows ragged, as `gated_delta_tree` says.
    max_seqlen_q : int, optional
        Rows that no request exceeds; needed with `cu_seqlens_q`.
    out : Tensor [B, T, C], optional
        Written in place and returned; dtype as `x`. Must not overlap another argument.

    Returns
    -------
    out : Tensor [B, T, C]

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device, stride or value; the message names it.
    IndexError
        A parent does not come before its child, or `cu_seqlens_q` does not deal all rows. On a GPU
        only with ``SPECATTN_CHECK=1``, because looking would wait for the device.

    Examples
    --------
    >>> import torch, specattn
    >>> x, weight, kept = torch.randn(2, 3, 24), torch.randn(24, 4), torch.randn(2, 3, 24)
    >>> out = specattn.causal_conv_tree(x, weight, None, kept, activation="silu")
    >>> specattn.causal_conv_commit(kept, x, None, torch.tensor([1, 3]))
    >>> out.shape, torch.equal(kept[1], x[1])
    (torch.Size([2, 3, 24]), True)
    """
    ragged = ragged_rows(cu_seqlens_q, max_seqlen_q)
    tensors: dict[str, Any] = {"conv_state": conv_state, "weight": weight, "bias": bias}
    sizes = check_tensors(x=x, **ragged, **tensors, parents=parents, out=out)
    check_option("weight: K", sizes["K"], sizes["K"] <= MOST_TAPS, f"2 to {MOST_TAPS} taps")
    check_option("activation", activation, activation in ACTIVATIONS, f"one of {ACTIVATIONS}")
    if out is None:
        out = x.new_empty(x.shape)
    if parents is not None and cu_seqlens_q is None and parents.dim() == 1:
        parents = parents[None]
    rows = ragged.get("cu_seqlens_q"), ragged.get("max_seqlen_q")
    call(_operator, sizes, x, weight, bias, conv_state, parents, activation, *rows, out)
    return out


def cost(x: torch.Tensor, weight: torch.Tensor) -> Cost:
    """Count rows, weights and what was kept in, as many rows out; without bias and activation."""
    (B, _, C), K, e = x.shape, weight.shape[1], x.element_size()
    read = (x.numel() + weight.numel() + B * (K - 1) * C) * e
    return Cost(read, x.numel() * e, 2 * x.numel() * K)
