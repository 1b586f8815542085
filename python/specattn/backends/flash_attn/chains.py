"""Hybrid attention of many rows by a flash-attn library, checked against our kernels before use."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from .. import select, winners
from ..backend import NotServed
from .libraries import Library

NAME = "flash_attn"
LEAST_ROWS = 128  # of a request: with fewer our kernels read K and V once for all of them
# Both round weights and results to the dtype: so many of its steps they may be apart.
_STEPS = 8
_LSE_APART = 2e-3


class Call(NamedTuple):
    """The operator's arguments, in its order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_seqlens: torch.Tensor
    k_tree: torch.Tensor | None
    v_tree: torch.Tensor | None
    tree_mask: torch.Tensor | None
    depths: torch.Tensor | None
    block_table: torch.Tensor | None
    window: int | None
    softmax_scale: float
    softcap: float
    sinks: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def kind(self) -> tuple:
        """The class of shapes: calls that their kernels treat alike."""
        q, heads = self.q, self.k_cache.shape[2]
        given = [x is None for x in (self.k_tree, self.tree_mask, self.block_table)]
        return (q.dtype, q.device, q.shape[3], q.shape[2] // heads, self.softcap > 0, *given)


class Chains:
    """`hybrid_tree_attention` by a library, where it was found to agree with our kernel.

    The first call of a class of shapes runs both and waits for the device. A class that disagrees
    is left to the other backends from then on, with one warning.
    """

    def __init__(self, library: Library):
        self.library = library
        self.agrees: dict[tuple, bool] = {}

    def __call__(self, *args) -> None:
        """Run on the operator's arguments."""
        call = Call(*args)
        if reason := self._why_not(call):
            raise NotServed(reason)
        kind = call.kind
        agrees = self.agrees.get(kind)
        if agrees is None and torch.cuda.is_current_stream_capturing():
            raise NotServed("a shape that was not checked before a graph was captured")
        with torch.no_grad():
            if agrees:
                self._attend(call)
                return
            if agrees is None and self._check(kind, call):
                return
        raise NotServed(f"what {self.library.name} was found to compute otherwise")

    def _why_not(self, call: Call) -> str | None:
        library, page_size = self.library, call.k_cache.shape[1]
        if call.k_cache.dtype != call.q.dtype:
            return f"a cache of {call.k_cache.dtype}"
        if call.cu_seqlens_q is not None:
            return "ragged rows"
        if call.window is not None or call.sinks is not None:
            return "windows and sinks"
        if not select.is_forced(NAME) and (reason := _slower(call)):
            return reason
        if call.tree_mask is not None and call.k_tree is None:
            return "a masked tree in the cache"
        if call.q.dtype not in library.dtypes:
            return f"{call.q.dtype} by {library.name}"
        paged = call.block_table is not None
        if paged and (library.page_size is None or page_size % library.page_size):
            return f"pages of {page_size} by {library.name}"
        return None

    def _attend(self, call: Call) -> None:
        q, cache, options = call.q, (call.k_cache, call.v_cache), (call.softmax_scale, call.softcap)
        results = call.out, call.lse
        if call.k_tree is None:
            lengths = call.cache_seqlens + q.shape[1]
            state = self.library(q, *cache, lengths, call.block_table, *options, True)
            for result, computed in zip(results, state, strict=True):
                result.copy_(computed)
            return
        prefix = self.library(q, *cache, call.cache_seqlens, call.block_table, *options, False)
        keys = call.k_tree, call.v_tree
        if call.tree_mask is None:
            lengths = torch.full_like(call.cache_seqlens, call.k_tree.shape[1])
            tree = self.library(q, *keys, lengths, None, *options, True)
        else:
            tree = torch.empty_like(call.out), torch.empty_like(call.lse)
            select.run_beside(NAME, "tree_attention", q, *keys, call.tree_mask, *options, *tree)
        select.run_beside(NAME, "merge_state", *prefix, *tree, *results)

    def _check(self, kind: tuple, call: Call) -> bool:
        """Run the call, and our kernels beside it; return whether they agree."""
        reason = "computes something else than our kernels"
        try:
            self._attend(call)
            agrees = _agree(call)
        except Exception as error:  # whatever an untested release may raise
            agrees, reason = False, f"raises {type(error).__name__}: {error}"
        self.agrees[kind] = agrees
        if not agrees:
            queries = f"{list(call.q.shape)} of {call.q.dtype}"
            warnings.warn(
                f"specattn: {self.library.name} {reason} for queries {queries}; "
                "such calls are left to our kernels",
                stacklevel=2,
            )
        return agrees


def _slower(call: Call) -> str | None:
    """Return why our kernels are faster: by measurement, or by the count of rows."""
    q, cache = call.q, call.k_cache
    context = cache.shape[1] * (1 if call.block_table is None else call.block_table.shape[1])
    sizes = q.shape[1] * (q.shape[2] // cache.shape[2]), context, q.shape[0]
    kernel = "hybrid_tree_attention", winners.DTYPES[q.dtype], q.shape[3]
    gpu = torch.cuda.get_device_properties(q.device).name
    if winner := winners.winner(gpu, winners.Shape(*kernel, *sizes)):
        return None if winner == NAME else f"a shape for which {winner} was measured faster"
    rows = q.shape[1]
    return f"{rows} rows of a request, fewer than {LEAST_ROWS}" if rows < LEAST_ROWS else None


def _agree(call: Call) -> bool:
    ours = call._replace(out=torch.empty_like(call.out), lse=torch.empty_like(call.lse))
    select.run_beside(NAME, "hybrid_tree_attention", *ours)
    apart = _STEPS * torch.finfo(call.out.dtype).eps * ours.out.abs().max()
    return _within(call.out, ours.out, apart) and _within(call.lse, ours.lse, _LSE_APART)


def _within(a: torch.Tensor, b: torch.Tensor, apart: float | torch.Tensor) -> bool:
    return bool(((a == b) | ((a.float() - b.float()).abs() <= apart)).all())
