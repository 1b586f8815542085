"""New keys and values, written into their slots of a cache."""

from __future__ import annotations

from typing import Any

import torch

from ._check import check_option, check_tensors
from ._library import call, define
from ._scales import EIGHT_BITS, cache_views, scale_inputs, scale_tensors
from .cost import Cost, Sizes

_operator = define(
    "write_kv(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slots, "
    "Tensor? k_scale, Tensor? v_scale, Tensor(c!)? new_k_scale, Tensor(d!)? new_v_scale)"
)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    scale: str = "given",
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Write new keys and values into their slots of a contiguous or paged cache, in place.

    A slot counts the tokens of the whole cache: ``page * page_size + offset`` in a paged one, which
    is vLLM's ``slot_mapping``; ``b * N + position`` in a contiguous one.

    Parameters
    ----------
    k, v : Tensor [tokens, Hk, D] or [B, T, Hk, D]
        float32, bfloat16 or float16; float64 on the reference. D is any, and may be another of `v`.
        Where values are a view of the keys, as those of latents are, `v` and `v_cache` are None.
    k_cache, v_cache : Tensor
        Paged [pages, page_size, Hk, D] or contiguous [B, N, Hk, D], written in place. Only the last
        dimension must be contiguous: a cache [pages, Hk, page_size, D] is given as
        ``cache.transpose(1, 2)``. Both of one dtype; if it is not that of `k`, values are rounded
        to the nearest, but float64 is mixed with no other floating type than those of 8 bits. They
        must not overlap `k` and `v`.
    slots : Tensor [tokens] or [B, T], int64 or int32
        A token with a negative slot is skipped, as padding is. No slot may be given twice: of
        tokens that share one any mixture may be left there.
    k_scale, v_scale : float or Tensor, optional
        Of a cache of 8 bits (int8, float8_e4m3fn, float8_e5m2), as `hybrid_tree_attention` takes
        them. Keys and values are stored over them, computed in float32, rounded to the nearest and
        to even on ties; what is too large becomes the largest number, NaN stays NaN, or becomes 0
        in int8, which has none.
    scale : {"given", "dynamic"}
        "dynamic" writes `k_scale` and `v_scale`, per token and head, instead of reading them: each
        row's greatest magnitude over the largest number of the type, and at least 1e-6.
    cache_dtype : torch.dtype, optional
        What the bytes of uint8 caches are.

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

    The same into a cache of 8 bits, which needs half the memory:

    >>> k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64, dtype=torch.int8)
    >>> k_scale, v_scale = torch.zeros(2, 4, 16, 2)
    >>> scales = {"k_scale": k_scale, "v_scale": v_scale, "scale": "dynamic"}
    >>> specattn.write_kv(k, v, k_cache, v_cache, torch.tensor([17, 63, -1]), **scales)
    >>> k_cache[1, 1, 0, 0] * k_scale[1, 1, 0]
    tensor(1.)
    """
    new: dict[str, Any] = {"k": k}
    caches: dict[str, Any] = {"k_cache": k_cache}
    scales: dict[str, Any] = {"k_scale": k_scale}
    if v is not None or v_cache is not None:
        new["v"], caches["v_cache"], scales["v_scale"] = v, v_cache, v_scale
    elif v_scale is not None:
        check_option("v_scale", v_scale, False, "None without values")
    caches = dict(zip(caches, cache_views(cache_dtype, **caches), strict=True))
    k_cache, v_cache = caches["k_cache"], caches.get("v_cache")
    scales = scale_tensors(k, **scales)
    sizes = check_tensors(**new, **caches, slots=slots, **scales)
    given = (*scale_inputs(scales, sizes), None)[:2]
    check_option("scale", scale, scale in ("given", "dynamic"), "'given' or 'dynamic'")
    if scale == "dynamic":
        if k_cache.dtype not in EIGHT_BITS:
            raise TypeError(f"k_cache: expected 8 bits for dynamic scales, got {k_cache.dtype}")
        for name, x in scales.items():
            found = None if x is None else list(x.shape)
            per_token = x is not None and x.dim() == 3
            check_option(name, found, per_token, "a scale per token and head to write")
    places = (None, None, *given) if scale == "dynamic" else (*given, None, None)
    if k.dim() == 3:
        k, v, slots = k[None], v if v is None else v[None], slots[None]
    call(_operator, sizes, k, v, k_cache, v_cache, slots, *places)


def cost(s: Sizes) -> Cost:
    """Count keys, values and int64 slots in, keys and values out."""
    moved = s.keys_and_values(s.T)
    return Cost(read=moved + 8 * s.B * s.T, written=moved, operations=0)
