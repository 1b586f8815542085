"""Allocation of the outputs that the caller did not give."""

from __future__ import annotations

import torch

from ._check import check_tensor
from ._specs import Spec, accumulation_dtype, allowed_dtypes


def state_like(
    q: torch.Tensor, v_dim: int, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `(out [.., v_dim], lse [..])` for the rows of `q`, allocating what is None.

    Rows of `q` are [B, T], or ragged [tokens]; of several states [n, B, T] they become [B, T].
    """
    if out is None:
        like = q[0] if q.dim() == 5 else q
        if v_dim == q.shape[-1]:
            out = torch.empty_like(like, memory_format=torch.contiguous_format)
        else:
            out = like.new_empty((*like.shape[:-1], v_dim))
    if lse is None:
        dtype = accumulation_dtype(q.dtype)
        # Cheaper than `new_empty`, and sizes one by one than a torch.Size, by 1 us.
        lse = torch.empty(*q.shape[-4:-1], dtype=dtype, device=q.device)
    return out, lse


def output_like(
    q: torch.Tensor,
    name: str,
    spec: Spec,
    sizes: dict[str, int],
    given: torch.Tensor | None,
    *,
    first_name: str = "q",
) -> torch.Tensor:
    """Return the output of that name, checked where it is given and allocated where not."""
    if given is not None:
        check_tensor(name, given, spec, q, sizes, first_name=first_name)
        return given
    shape = [sizes[symbol] for symbol in spec.shapes[0]]
    return q.new_empty(shape, dtype=allowed_dtypes(spec.dtypes, q.dtype)[0])
