"""transformers' masks as lengths and windows, where those describe them completely.

transformers builds its masks once per pass through a registered function, and hands what this
returns to every layer. Ours returns a `Carrier` of a `Visible`: causal order, a window and padding
take a few numbers per request. Everything else stays the mask that SDPA takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)

_OVERLAY = sliding_window_overlay(1).__code__  # what all its windows share
_FORM = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "layout")]
    + [getattr(torch.Tensor, name).__get__ for name in ("ndim", "requires_grad", "shape")]
    + [getattr(torch.Tensor, name) for name in ("__len__", "dim", "size", "stride")]
)  # of a tensor, what says nothing of its values


@dataclass
class Visible:
    """Which keys the new rows of a pass see, in a layer of one kind.

    Before its `rows` new rows (T) a layer is given `seen` keys. `window` is in tokens, the query's
    own included. `spans` are each request's first key that is no padding and the one behind the
    last; None: no request is padded. `arguments` are those that transformers called `mask` with.
    """

    seen: int
    rows: int
    window: int | None
    spans: list[tuple[int, int]] | None
    arguments: dict[str, Any]
    _kept: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, cached under `key`: the layers of a pass need the same."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def dense(self, kind: Callable) -> torch.Tensor | None:
        """Return the mask that `sdpa_mask` or `eager_mask` makes of it."""
        return self.once(kind, lambda: kind(**self.arguments))

    def whole(self) -> torch.Tensor:
        """Return the dense mask, bool [B, 1, T, N]."""
        options = {**self.arguments, "allow_is_causal_skip": False}
        return self.once("whole", lambda: sdpa_mask(**options))

    @property
    def trailing(self) -> bool:
        """Whether every request has T rows, and all padding lies before them."""
        last = self.seen + self.rows
        return all(first <= self.seen and end == last for first, end in self.spans or ())


class Carrier(torch.Tensor):
    """A mask [B, 1, T, N], bool, without memory of its own, which models hand to our attention.

    Our attention function reads `visible`. Any other use materialises the mask that it stands for,
    so that a model which adds to its mask, or slices it, is right all the same.
    """

    visible: Visible

    @classmethod
    def of(cls, visible: Visible, shape: tuple[int, ...], device: torch.device | str) -> Carrier:
        """Return a carrier in the shape of the mask that it replaces."""
        carrier = torch.zeros((), dtype=torch.bool, device=device).expand(shape).as_subclass(cls)
        carrier.visible = visible
        return carrier

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Materialise the mask, except for what depends on its shape and type alone."""
        kwargs = kwargs or {}
        if func in _FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(cls, lambda one: one.visible.whole(), (args, kwargs))
        return func(*args, **kwargs)

    def to(self, *args, **kwargs) -> torch.Tensor:
        """Move to another device, as models that are spread over several do."""
        moved = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if moved.dtype != self.dtype:
            return self.visible.whole().to(*args, **kwargs)
        return Carrier.of(self.visible, tuple(self.shape), moved.device)

    def contiguous(self, memory_format=torch.contiguous_format) -> Carrier:
        """Return itself: `generate` calls this where a cache is static."""
        return self


@torch.compiler.disable
def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Serve transformers' mask interface; the parameters are those of its `sdpa_mask`.

    Returns a `Carrier` [B, 1, T, N] where a `Visible` says all, else what `sdpa_mask` returns.
    """
    # A static cache passes its own counter, which the layers then change in place.
    q_offset = int(q_offset)
    arguments = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        **options,
    }
    causal, window = _causal_window(mask_function)
    known, spans = _spans(attention_mask, kv_offset, q_offset + q_length)
    if not (causal and known):
        return sdpa_mask(**arguments)
    visible = Visible(q_offset - kv_offset, q_length, window, spans, arguments)
    # Four dimensions, by which transformers recognises a finished mask.
    shape = batch_size, 1, q_length, kv_length
    return Carrier.of(visible, shape, options.get("device", "cpu"))


def visible_of(attention_mask: torch.Tensor | None) -> Visible | None:
    """Return the description in a mask from `mask`, or None for another's mask."""
    return attention_mask.visible if isinstance(attention_mask, Carrier) else None


def additive(attention_mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask as eager attention takes it, which adds it."""
    if attention_mask is None or attention_mask.dtype != torch.bool:
        return attention_mask
    zero = torch.zeros((), dtype=dtype, device=attention_mask.device)
    return torch.where(attention_mask, zero, torch.finfo(dtype).min)


def _causal_window(function: Callable) -> tuple[bool, int | None]:
    """Return whether a mask function is causal and at most windowed, and its window.

    transformers composes its mask functions of closures; only those of a causal window are
    recognised, not a chunk's, a packed sequence's or a function of the user's.
    """
    if function is causal_mask_function:
        return True, None
    parts = _closed_over(function).get("mask_functions", ())
    if len(parts) == 2 and parts[1] is causal_mask_function and parts[0].__code__ is _OVERLAY:
        return True, _closed_over(parts[0])["sliding_window"]
    return False, None


def _closed_over(function: Callable) -> dict[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


def _spans(
    attention_mask: torch.Tensor | None, first: int, end: int
) -> tuple[bool, list[tuple[int, int]] | None]:
    """Return whether each request's keys `first` to `end` are one run, and the runs.

    Positions in the runs count from `first`; None: no padding.
    """
    if attention_mask is None:
        return True, None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < end:
        return False, None
    counted = attention_mask[:, first:end].bool()
    if counted.all():
        return True, None
    starts, counts = counted.int().argmax(1), counted.sum(1)
    places = torch.arange(counted.shape[1], device=counted.device)
    runs = (places >= starts[:, None]) & (places < (starts + counts)[:, None])
    if not torch.equal(runs, counted):
        return False, None
    return True, list(zip(starts.tolist(), (starts + counts).tolist(), strict=True))
