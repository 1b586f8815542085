"""Converting states to and from the conventions of other libraries.

Here `lse` is the natural logarithm, shaped as `out` without its last dimension: [.., T, Hq].

=============================  =========  ===================
library                        base       shape of lse
=============================  =========  ===================
specattn                       e          [B, T, Hq]
FlashInfer                     2          [tokens, Hq]
FlashAttention 2, 3            e          [B, Hq, T]
FlashAttention (varlen), vLLM  e          [Hq, tokens]
=============================  =========  ===================

For the layouts over tokens, flatten the first two dimensions: ``lse.flatten(0, 1)``.
"""

from __future__ import annotations

import math

import torch


def lse_to_log2(lse: torch.Tensor) -> torch.Tensor:
    """Return a natural log-sum-exp in base 2, as FlashInfer keeps it.

    Parameters
    ----------
    lse : Tensor of any shape

    Returns
    -------
    Tensor of that shape

    Examples
    --------
    >>> lse_to_log2(torch.tensor([math.log(8.0), -math.inf]))
    tensor([3., -inf])
    """
    return lse * math.log2(math.e)


def lse_from_log2(lse: torch.Tensor) -> torch.Tensor:
    """Return a base-2 log-sum-exp, as FlashInfer keeps it, in base e.

    Parameters
    ----------
    lse : Tensor of any shape

    Returns
    -------
    Tensor of that shape

    Examples
    --------
    >>> lse_from_log2(torch.tensor([0.0, -math.inf]))
    tensor([0., -inf])
    """
    return lse * math.log(2)


def lse_heads_first(lse: torch.Tensor) -> torch.Tensor:
    """Return [.., T, Hq] as a contiguous [.., Hq, T], as FlashAttention and vLLM keep it.

    Parameters
    ----------
    lse : Tensor [.., T, Hq]

    Returns
    -------
    Tensor [.., Hq, T]

    Examples
    --------
    >>> lse_heads_first(torch.zeros(2, 5, 8)).shape
    torch.Size([2, 8, 5])
    """
    return lse.transpose(-1, -2).contiguous()


def lse_heads_last(lse: torch.Tensor) -> torch.Tensor:
    """Return [.., Hq, T] as a contiguous [.., T, Hq], as this package keeps it.

    Parameters
    ----------
    lse : Tensor [.., Hq, T]

    Returns
    -------
    Tensor [.., T, Hq]

    Examples
    --------
    >>> lse_heads_last(torch.zeros(8, 10)).shape
    torch.Size([10, 8])
    """
    return lse.transpose(-1, -2).contiguous()
