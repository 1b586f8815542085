"""Ragged (variable-length) queries: those of all requests packed along one dimension."""

from __future__ import annotations

from typing import Any

import torch

from ._check import check_option
from ._options import number


def ragged_rows(cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int | None) -> dict[str, Any]:
    """Return what `check_tensors` takes for ragged queries, nothing for uniform ones.

    Raises
    ------
    TypeError, ValueError
        `max_seqlen_q` is missing or no count of rows, or is given without `cu_seqlens_q`.
    """
    if cu_seqlens_q is None:
        check_option(
            "max_seqlen_q", max_seqlen_q, max_seqlen_q is None, "None without cu_seqlens_q"
        )
        return {}
    return {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": number("max_seqlen_q", max_seqlen_q)}
