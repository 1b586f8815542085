"""Merging any number of attention states over disjoint sets of keys."""

from __future__ import annotations

import torch

from ._check import check_tensors
from ._library import STATE, call, define
from ._outputs import state_like

_operator = define(f"merge_states(Tensor outs, Tensor lses, {STATE})")


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge n attention states over disjoint keys into one; see `merge_state`.

    Parameters
    ----------
    outs : Tensor [n, B, T, Hq, Dv]
        float32, bfloat16 or float16; float64 on the reference. n >= 1.
    lses : Tensor [n, B, T, Hq]
        float32, natural logarithm; -inf or +inf marks an empty state.
    out, lse : Tensor, optional
        Written in place and returned.

    Returns
    -------
    out : Tensor [B, T, Hq, Dv]
    lse : Tensor [B, T, Hq]

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device or stride; the message names it.

    Examples
    --------
    >>> import torch, specattn
    >>> outs, lses = torch.randn(4, 2, 1, 8, 64), torch.randn(4, 2, 1, 8)
    >>> out, lse = specattn.merge_states(outs, lses)
    >>> torch.allclose(lse, lses.logsumexp(0))
    True
    """
    sizes = check_tensors(outs=outs, lses=lses, out=out, lse=lse)
    out, lse = state_like(outs, sizes["Dv"], out, lse)
    call(_operator, sizes, outs, lses, out, lse)
    return out, lse
