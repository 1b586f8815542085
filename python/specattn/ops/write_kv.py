"""New keys and values, written into their slots of a cache."""

from __future__ import annotations

import torch

from ._check import check_tensors
from ._library import call, define
from .cost import Cost, Sizes

_operator = define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots)"
)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write new keys and values into their slots of a contiguous or paged cache, in place.

    A slot counts the tokens of the whole cache: ``page * page_size + offset`` in a paged one, which
    is vLLM's ``slot_mapping``; ``b * N + position`` in a contiguous one.

    Parameters
    ----------
    k, v : Tensor [tokens, Hk, D] or [B, T, Hk, D]
        float32, bfloat16 or float16; float64 on the reference. D is any.
    k_cache, v_cache : Tensor
        Paged [pages, page_size, Hk, D] or contiguous [B, N, Hk, D], written in place. Only the last
        dimension must be contiguous: a cache [pages, Hk, page_size, D] is given as
        ``cache.transpose(1, 2)``. Both of one dtype; if it is not that of `k`, values are rounded
        to the nearest, but float64 is not mixed with others. They must not overlap `k` and `v`.
    slots : Tensor [tokens] or [B, T], int64 or int32
        A token with a negative slot is skipped, as padding is. No slot may be given twice: of
        tokens that share one any mixture may be left there.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device or stride; the message names it.
    IndexError
        A slot lies behind the cache; nothing is written then. On a GPU only with
        ``SPECATTN_CHECK=1``, because looking would wait for the device.

    Examples
    --------
    Two tokens into a cache of four pages of 16, a third left out:

    >>> import torch, specattn
    >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64)
    >>> k, v = torch.ones(2, 3, 2, 64)
    >>> specattn.write_kv(k, v, k_cache, v_cache, torch.tensor([17, 63, -1]))
    >>> k_cache[..., 0, 0].nonzero().tolist()
    [[1, 1], [3, 15]]
    """
    sizes = check_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    if v_cache.dtype != k_cache.dtype:
        raise TypeError(f"v_cache: expected {k_cache.dtype} as k_cache, got {v_cache.dtype}")
    if k.dim() == 3:
        k, v, slots = k[None], v[None], slots[None]
    call(_operator, sizes, k, v, k_cache, v_cache, slots)


def cost(s: Sizes) -> Cost:
    """Count keys, values and int64 slots in, keys and values out."""
    moved = 2 * s.keys(s.T)
    return Cost(read=moved + 8 * s.B * s.T, written=moved, operations=0)
