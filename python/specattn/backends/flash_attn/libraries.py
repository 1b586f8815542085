"""The flash-attn libraries: names, what they serve, and their calls for a softmax state.

A state is ``(out, lse)``: q [B, T, Hq, D] over the first `lengths` [B] of keys [B, N, Hk, D], or
of pages [pages, page_size, Hk, D] with a table, natural log-sum-exps [B, Hq, T] in float32. With
``causal`` the last row sees all of its keys, and each before it one less.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

State = tuple[torch.Tensor, torch.Tensor]


class Library(NamedTuple):
    """A library: ``state(module, q, k, v, lengths, table, scale, softcap, causal)`` calls it."""

    name: str  # of its package
    module: str
    capabilities: tuple[int, ...]  # major ones that it has kernels for
    dtypes: tuple[torch.dtype, ...]
    page_size: int | None  # pages are multiples of so many tokens; None: it takes no pages
    state: Callable[..., State]

    def __call__(self, *args) -> State:
        """Return the state of a call, -inf where a row sees no key."""
        out, lse = self.state(importlib.import_module(self.module), *args)
        # flash-attn 2 says inf there unless it splits.
        return out, lse.masked_fill(lse == torch.inf, -torch.inf).transpose(1, 2).contiguous()


def _with_cache(pages: str) -> Callable[..., State]:
    def state(module: Any, q, k, v, lengths, table, scale, softcap, causal) -> State:
        return module.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, softmax_scale=scale, softcap=softcap, causal=causal,
            return_softmax_lse=True, **({} if table is None else {pages: table}),
        )[:2]  # fmt: skip

    return state


def _varlen(module: Any, q, k, v, lengths, table, scale, softcap, causal) -> State:
    return module.flash_attn_varlen_func(
        q, k, v, seqused_k=lengths, page_table=table, softmax_scale=scale, softcap=softcap,
        causal=causal, return_lse=True,
    )[:2]  # fmt: skip


_HALVES = (torch.bfloat16, torch.float16)
# The best first, for those GPUs that it is for. fa3-fwd leaves pages and float16 out.
LIBRARIES = (
    Library("flash-attn-4", "flash_attn.cute", (10,), _HALVES, 1, _varlen),
    Library("flash-attn 3", "flash_attn_interface", (9,), _HALVES, 1, _with_cache("page_table")),
    Library("fa3-fwd", "fa3_fwd_interface", (9,), _HALVES[:1], None, _with_cache("page_table")),
    Library(
        "flash-attn 2",
        "flash_attn.flash_attn_interface",  # flash-attn-4 shares its package
        (8, 9, 10, 12),
        _HALVES,
        256,
        _with_cache("block_table"),
    ),
)


def installed() -> list[Library]:
    """Return those that are installed."""
    return [library for library in LIBRARIES if _is_there(library.module)]


def best(capability: tuple[int, int]) -> Library | None:
    """Return the best that is installed and has kernels for a compute capability."""
    return next((x for x in installed() if capability[0] in x.capabilities), None)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # not even its package
        return False
