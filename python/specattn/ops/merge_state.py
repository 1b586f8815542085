"""Merging two attention states over disjoint sets of keys."""

from __future__ import annotations

from typing import Any

import torch

from ._check import check_tensors
from ._library import STATE, call, define
from ._outputs import state_like
from .cost import Cost, Sizes

_operator = define(f"merge_state(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, {STATE})")


def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention states over disjoint keys into the state over all of them.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and
    ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``
    (LongSpec, arXiv 2502.17421, section 3.3, "Aggregation").

    Parameters
    ----------
    out_a, out_b : Tensor [B, T, Hq, Dv]
        float32, bfloat16 or float16, both the same; float64 on the reference.
    lse_a, lse_b : Tensor [B, T, Hq]
        float32, **natural** logarithm: convert FlashInfer's with `specattn.ops.lse_from_log2`. An
        empty state has -inf; +inf, which older kernels write, is read as -inf. What stands in
        the output of an empty state does not matter.
    out, lse : Tensor, optional
        Written in place and returned.

    Returns
    -------
    out : Tensor [B, T, Hq, Dv]
    lse : Tensor [B, T, Hq]
        Where both states are empty: 0 and -inf.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device or stride; the message names it.

    Examples
    --------
    >>> import torch, specattn
    >>> out, lse = torch.ones(1, 1, 1, 8), torch.zeros(1, 1, 1)
    >>> merged, merged_lse = specattn.merge_state(out, lse, 3 * out, lse)
    >>> merged[0, 0, 0, 0].item(), round(merged_lse.exp().item(), 6)
    (2.0, 2.0)
    """
    states: dict[str, Any] = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    sizes = check_tensors(**states, out=out, lse=lse)
    out, lse = state_like(out_a, sizes["Dv"], out, lse)
    call(_operator, sizes, *states.values(), out, lse)
    return out, lse


def cost(s: Sizes) -> Cost:
    """Count the states in, one state out; each value is weighted and added."""
    return Cost(s.states * s.state, s.state, 2 * s.states * s.B * s.T * s.Hq * s.v_dim)
