"""The state of a gated delta layer behind accepted tokens, in place."""

from __future__ import annotations

import torch

from ._check import check_option, check_tensors
from ._library import call, define
from ._ragged import ragged_rows
from .cost import Cost
from .gated_delta_tree import check_gated_sizes

_operator = define(
    "gated_delta_commit(Tensor(a!) state, Tensor stash, Tensor? nodes, Tensor counts, "
    "Tensor? cu_seqlens_q, SymInt? max_seqlen_q)"
)


def gated_delta_commit(
    state: torch.Tensor,
    stash: torch.Tensor,
    nodes: torch.Tensor | None,
    counts: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> None:
    """Advance the states along the accepted path of each request's tree, in place.

    A state is read and written once, whatever was accepted; one of a request that accepts nothing
    stays as it is, bit for bit.

    Parameters
    ----------
    state : Tensor [B, Hv, Dk, Dv], float32
        What `gated_delta_tree` has read; float64 on the reference.
    stash : Tensor [B, T, Hv, Ds], float32
        What it returned, [tokens, Hv, Ds] of ragged rows.
    nodes : Tensor [B, P], int64, or None
        Rows of each request from one without a parent downwards, every one the child of the one
        before it; what lies behind the first `counts` is not read. None names the first rows, as of
        a chain.
    counts : Tensor [B], int64
        How many of `nodes` become part of the state, 0 to P.
    cu_seqlens_q : Tensor [B + 1], int32, optional
        Of ragged rows, with `max_seqlen_q`, as `gated_delta_tree` was given them.
    max_seqlen_q : int, optional
        Rows that no request exceeds.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device or stride; the message names it.
    IndexError
        A node is no row of its request, or a count exceeds them; no state is changed then. On a GPU
        only with ``SPECATTN_CHECK=1``, because looking would wait for the device.

    Examples
    --------
    The second of two requests accepts nothing:

    >>> import torch, specattn
    >>> q, k, v = torch.randn(3, 2, 4, 1, 8)
    >>> g, beta, state = -torch.rand(2, 4, 1), torch.rand(2, 4, 1), torch.randn(2, 1, 8, 8)
    >>> before = state.clone()
    >>> out, stash = specattn.gated_delta_tree(q, k, v, g, beta, state)
    >>> specattn.gated_delta_commit(state, stash, None, torch.tensor([3, 0]))
    >>> torch.equal(state[0], before[0]), torch.equal(state[1], before[1])
    (False, True)
    """
    ragged = ragged_rows(cu_seqlens_q, max_seqlen_q)
    sizes = check_tensors(state=state, **ragged, stash=stash, nodes=nodes, counts=counts)
    check_gated_sizes(sizes)
    k_dim, v_dim = sizes["Dk"], sizes["Dv"]
    widths = (k_dim + v_dim + 1, k_dim + v_dim + k_dim)
    expected = f"{widths[0]} or {widths[1]} numbers"
    check_option("stash.shape", [*stash.shape], stash.shape[-1] in widths, expected)
    rows = ragged.get("cu_seqlens_q"), ragged.get("max_seqlen_q")
    call(_operator, sizes, state, stash, nodes, counts, *rows)


def cost(state: torch.Tensor, accepted: int) -> Cost:
    """Count the state in and out, and the stash of so many tokens of each request."""
    B, Hv, Dk, Dv = state.shape
    stash = 4 * B * accepted * Hv * (Dk + Dv + 1)
    size = 4 * state.numel()
    return Cost(size + stash, size, state.numel() * (2 * accepted + 1))
