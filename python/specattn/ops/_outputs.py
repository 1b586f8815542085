"""Allocating what the caller did not give."""

from __future__ import annotations

import torch

from ._check import accumulation_dtype


def state_like(
    q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(out, lse)` like `q`, [.., B, T, Hq, D], allocating what is None."""
    if out is None:
        like = q if q.dim() == 4 else q[0]
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
    if lse is None:
        lse = q.new_empty(q.shape[-4:-1], dtype=accumulation_dtype(q.dtype))
    return out, lse
