"""What a short causal convolution keeps, behind accepted tokens, in place."""

from __future__ import annotations

import torch

from ._check import check_tensors
from ._library import call, define
from ._ragged import ragged_rows
from .cost import Cost

_operator = define(
    "causal_conv_commit(Tensor(a!) conv_state, Tensor x, Tensor? nodes, Tensor counts, "
    "Tensor? cu_seqlens_q, SymInt? max_seqlen_q)"
)


def causal_conv_commit(
    conv_state: torch.Tensor,
    x: torch.Tensor,
    nodes: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> None:
    """Keep the last inputs of the accepted path of each request's tree, in place.

    Parameters
    ----------
    conv_state : Tensor [B, K - 1, C]
        What `causal_conv_tree` has read.
    x : Tensor [B, T, C]
        The inputs that it was given, [tokens, C] of ragged rows; dtype as `conv_state`.
    nodes : Tensor [B, P], int64, or None
        The path, as `gated_delta_commit` takes it.
    counts : Tensor [B], int64
        How many of `nodes` are accepted; 0 leaves what is kept as it is.
    cu_seqlens_q : Tensor [B + 1], int32, optional
        Of ragged rows, with `max_seqlen_q`, as `causal_conv_tree` was given them.
    max_seqlen_q : int, optional
        Rows that no request exceeds.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device or stride; the message names it.
    IndexError
        A node is no row of its request, or a count exceeds them; nothing is changed then. On a GPU
        only with ``SPECATTN_CHECK=1``, because looking would wait for the device.

    Examples
    --------
    Of three rows the first is accepted for one request, and two for the other:

    >>> import torch, specattn
    >>> x, kept = torch.arange(6.0).view(2, 3, 1), torch.full((2, 3, 1), -1.0)
    >>> nodes = torch.tensor([[0, -1], [0, 2]])
    >>> specattn.causal_conv_commit(kept, x, nodes, torch.tensor([1, 2]))
    >>> kept.squeeze(2).tolist()
    [[-1.0, -1.0, 0.0], [-1.0, 3.0, 5.0]]
    """
    ragged = ragged_rows(cu_seqlens_q, max_seqlen_q)
    sizes = check_tensors(x=x, **ragged, conv_state=conv_state, nodes=nodes, counts=counts)
    rows = ragged.get("cu_seqlens_q"), ragged.get("max_seqlen_q")
    call(_operator, sizes, conv_state, x, nodes, counts, *rows)


def cost(conv_state: torch.Tensor) -> Cost:
    """Count as many inputs in as are kept."""
    size = conv_state.numel() * conv_state.element_size()
    return Cost(size, size, 0)
