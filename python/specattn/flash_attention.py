"""FlashAttention 2, 3 and 4 over a chain whose keys are stored: is it here, and its exact calls."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

# Of FlashAttention 3 the wheel `fa3-fwd` has one name, a build from source the other.
MODULES = {
    "flash-attn 2": ("flash_attn",),
    "flash-attn 3": ("flash_attn_interface", "fa3_fwd_interface"),
    "flash-attn 4": ("flash_attn.cute",),
}
_WITHOUT_PAGES = "fa3_fwd_interface"  # as that wheel is built
_TUNED: dict[
    str, dict[str, Any]
] = {  # splits 0: a heuristic chooses; packed: heads of a group are rows of one tile
    "splits 0": {"num_splits": 0, "pack_gqa": None},
    "splits 0, packed": {"num_splits": 0, "pack_gqa": True},
    "splits 1, packed": {"num_splits": 1, "pack_gqa": True},
}


@functools.cache
def loaded(name: str) -> ModuleType | str:
    """Return a library, a name in `MODULES` or of a module, or in a line why it is not there."""
    modules = MODULES.get(name, (name,))
    for module in modules:
        try:
            if importlib.util.find_spec(module) is None:
                continue
        except ModuleNotFoundError:  # nor is what it is a part of
            continue
        try:
            return importlib.import_module(module)
        except Exception as error:  # built for another torch, or without this driver
            said = " ".join(str(error).split())[:120]
            return f"{module} does not load: {type(error).__name__}: {said}"
    return f"{' or '.join(modules)} is not installed"


def chain(
    library: ModuleType, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    *, softmax_scale: float, window: int | None = None, softcap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Return out [B, T, Hq, D] of rows [B, T, Hq, D], the last of which sees all keys.

    Keys and values are [B, N, Hk, D], of any strides but the last; each row before sees one fewer,
    and with a `window` the last so many. The same call in FlashAttention 2, 3 and 4.
    """
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": True}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if softcap:
        options["softcap"] = softcap
    found = library.flash_attn_func(q, k, v, **options)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out


def calls(
    name: str,
    library: ModuleType,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None = None,
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what computes a causal chain, by what it is called in tables.

    Parameters
    ----------
    name : str
        One of `MODULES`.
    library : module
        What `loaded` returns for it.
    q : Tensor [B, T, Hq, D]
        The chain's rows; the last one sees all keys, each before it one fewer.
    k_cache, v_cache : Tensor [B, N, Hk, D], or [pages, page_size, Hk, D]
        The chain's own keys are stored. FlashAttention 4 reads all N of them.
    lengths : Tensor [B], int32
        Keys of each request, the chain's included.
    block_table : Tensor [B, max_pages], int32, optional
        Pages; only FlashAttention 3 takes those of any size.

    Returns
    -------
    dict
        Functions that return out [B, T, Hq, D]; none where the library does not take this cache.
    """
    paged = block_table is not None
    if paged and (name != "flash-attn 3" or library.__name__ == _WITHOUT_PAGES):
        return {}
    if name == "flash-attn 4":

        def attend(**tuned) -> torch.Tensor:
            return library.flash_attn_func(q, k_cache, v_cache, causal=True, **tuned)[0]
    else:
        given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
        given |= {"page_table": block_table} if paged else {}

        def attend(**tuned) -> torch.Tensor:
            return library.flash_attn_with_kvcache(q, k_cache, v_cache, **given, **tuned)

    if name == "flash-attn 2":
        return {name: attend}
    return {f"{name}, {how}": functools.partial(attend, **tuned) for how, tuned in _TUNED.items()}
