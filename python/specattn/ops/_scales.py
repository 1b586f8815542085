"""Caches of 8 bits: what their elements are, and what these are multiplied with."""

from __future__ import annotations

from typing import Any

import torch

from ..reference._eight_bits import EIGHT_BITS
from ._check import check_option
from ._options import number


def cache_views(cache_dtype: torch.dtype | None, **caches: Any) -> list[Any]:
    """Return caches with their bytes read as `cache_dtype`, as they are where that is None.

    Raises
    ------
    ValueError
        `cache_dtype` has no 8 bits.
    TypeError
        A cache is neither of uint8 nor of `cache_dtype`.
    """
    if cache_dtype is None:
        return list(caches.values())
    expected = " or ".join(map(str, EIGHT_BITS))
    check_option("cache_dtype", cache_dtype, cache_dtype in EIGHT_BITS, f"None or {expected}")
    for name, cache in caches.items():
        found = getattr(cache, "dtype", type(cache).__name__)
        if found not in (torch.uint8, cache_dtype):
            raise TypeError(f"{name}: expected torch.uint8 or {cache_dtype}, got {found}")
    return [cache.view(cache_dtype) for cache in caches.values()]


def scale_tensors(q: Any, **scales: Any) -> dict[str, Any]:
    """Return scales, of which numbers become tensors without dimensions, by their names."""
    return {
        name: scale
        if scale is None or isinstance(scale, torch.Tensor)
        else torch.full((), number(name, scale), dtype=torch.float32, device=q.device)
        for name, scale in scales.items()
    }


def scale_inputs(scales: dict[str, Any], sizes: dict[str, int]) -> tuple[torch.Tensor | None, ...]:
    """Return checked scales as operators take them: [Hk], or in the cache's layout."""
    return tuple(
        [x.expand(sizes["Hk"]) if x is not None and x.dim() == 0 else x for x in scales.values()]
    )
