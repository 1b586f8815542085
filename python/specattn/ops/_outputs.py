"""Allocating what the caller did not give."""

from __future__ import annotations

import torch

from ._check import accumulation_dtype


def state_like(
    q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(out, lse)` like `q`, [.., B, T, Hq, D], allocating what is None."""
    shape = q.shape[-4:]
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(shape[:-1], dtype=accumulation_dtype(q.dtype), device=q.device)
    return out, lse
