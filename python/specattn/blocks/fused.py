"""The operators of blocks on a GPU: few launches of Triton kernels, to be captured in a graph.

What they return is new memory, in a capture that of the graph's pool; but logits, by far the
largest, are left in memory that all programs share. Up to 32 rows, all requests together, and 64 of
codes and of float32, a linear layer is one kernel, whose sums are the same for a row beside any
others; of more rows torch computes the products, in the same graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from specattn.blocks.ops import (
    ACTIVATIONS,
    Drawing,
    Norm,
    Ops,
    Place,
    Projection,
    Rotation,
    Store,
    projection,
    whole,
)
from specattn.blocks.results import Results
from specattn.quantised import QuantisedWeight
from specattn.reference.select_topk import selection_size
from specattn.triton_kernels import children as _children
from specattn.triton_kernels.draw import draw_behind
from specattn.triton_kernels.linear_few_rows import (
    MOST_PARTS,
    MOST_ROWS,
    linear_few_rows,
    linear_parts,
)
from specattn.triton_kernels.rms_norm import add_norm, rms_norm
from specattn.triton_kernels.rms_norm import gate as _gate
from specattn.triton_kernels.rotate_heads import rotate_heads
from specattn.triton_kernels.select_topk import select_topk

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # others are left to torch
_MOST_WHOLE = 32
"""Rows for which torch's products of 16 bits are not much faster: on an H100 a pass of 64 rows
through 8B took 7.8 ms by them, 11.0 by the kernel in tiles of few rows; of 32 rows 7.1, 7.3."""
_FINISHING = ("silu", "gelu", "gelu_tanh")  # activations that the kernel of a product applies

_Layer = tuple[torch.Tensor | QuantisedWeight, torch.Tensor | None]
"""A weight [N, K], and its bias [N] or None."""


class Fused(Ops):
    """The operators of blocks as few kernels; what has none of its own is torch's.

    Inputs of a program stay as they are: before it is captured it runs once.
    """

    def __init__(self) -> None:
        self._results = Results()

    def norm(self, x: torch.Tensor, norm: Norm, *, keep: bool = False) -> torch.Tensor:
        if x.dtype not in _DTYPES:
            return super().norm(x, norm, keep=keep)
        return rms_norm(x, norm.weight, norm.eps)

    def norm_parts(self, x: torch.Tensor, *parts: tuple[int, Norm | None]) -> torch.Tensor:
        if x.dtype not in _DTYPES:
            return super().norm_parts(x, *parts)
        out, widths = torch.empty_like(x), [width for width, _ in parts]
        for piece, to, (_, norm) in zip(
            x.split(widths, -1), out.split(widths, -1), parts, strict=True
        ):
            if norm is None:
                to.copy_(piece)
            else:
                rms_norm(piece, norm.weight, norm.eps, to)
        return out

    def linear(
        self,
        x: torch.Tensor,
        *projections: Projection,
        gate: str | None = None,
        activation: str | None = None,
        residual: torch.Tensor | None = None,
        keep: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        whole_weights = not all(isinstance(one.weight, QuantisedWeight) for one in projections)
        most = _MOST_WHOLE if whole_weights and x.dtype != torch.float32 else MOST_ROWS
        few = len(rows) <= most and x.dtype in _DTYPES
        # Codes meet many rows widened, by torch.
        widens = [not (few and isinstance(one.weight, QuantisedWeight)) for one in projections]
        layers: list[_Layer] = [
            (whole(weight, x.dtype) if widen else weight, bias)
            for (weight, bias), widen in zip(projections, widens, strict=True)
        ]
        sizes = [len(weight) for weight, _ in layers]
        added = None if residual is None else residual.flatten(0, -2)
        up = None
        if gate is not None and layers[1][1] is None and _codes(layers[0]) == _codes(layers[1]):
            up = layers[1][0]
        function = gate if gate is not None else activation
        if few and function in _FINISHING and (gate is None or up is not None):
            out = x.new_empty(len(rows), sizes[0])
            _multiplied(rows, *layers[0], up, function, added, out)
        else:
            direct = None if function is not None or into is None else into.flatten(0, -2)
            out = x.new_empty(len(rows), sum(sizes)) if direct is None else direct
            _side_by_side(rows, layers, added if function is None else None, out, few)
            if gate is not None:
                first, second = out.split(sizes, -1)
                out = self.gate(second, first, gate)
            elif activation is not None:
                out = ACTIVATIONS[activation](out)
            if function is not None and added is not None:
                out = added + out
        out = out.view(*x.shape[:-1], -1)
        return out if into is None or function is None else into.copy_(out)

    def gate(self, x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
        if x.dtype not in _DTYPES:
            return super().gate(x, gate, activation)
        return _gate(x, gate, activation)

    def add(
        self, x: torch.Tensor, added: torch.Tensor, factor: float = 1.0, norm: Norm | None = None
    ) -> torch.Tensor:
        if x.dtype not in _DTYPES:
            return super().add(x, added, factor, norm)
        weight, eps = (None, 0.0) if norm is None else norm
        return add_norm(x, added, factor, weight, eps)

    def rotate(
        self,
        heads: torch.Tensor,
        q_heads: int,
        place: Rotation,
        *,
        norms: tuple[Norm | None, Norm | None] = (None, None),
        store: Store | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not isinstance(place, Place) or heads.dtype not in _DTYPES:
            return super().rotate(heads, q_heads, place, norms=norms, store=store)
        q, k, v = rotate_heads(heads, q_heads, norms, place, store)
        return q, k, v

    def head(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        return self.logits(x, projection(module)) if type(module) is nn.Linear else module(x)

    def logits(self, x: torch.Tensor, head: Projection) -> torch.Tensor:
        out = self._results.rows(x[..., 0].numel(), len(head.weight), x)
        return self.linear(x, head, into=out.view(*x.shape[:-1], -1))

    def draw(self, logits: torch.Tensor, ahead: int, how: Drawing) -> torch.Tensor:
        if logits.dtype not in _DTYPES or logits.stride(-1) != 1:
            return super().draw(logits, ahead, how)
        for processor in how.processors:
            logits = processor(None, logits[:, 0].float())[:, None]
        tokens: torch.Tensor = draw_behind(logits, ahead, how.temperatures, how.places, how.seed)
        return tokens

    def select(
        self, scores: torch.Tensor, prefix: torch.Tensor, newer: int, **share: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if scores.dtype != torch.float32:
            return super().select(scores, prefix, newer, **share)
        layers, batch, *heads, capacity = scores.shape
        ratio, budget = share.get("ratio"), share.get("budget")
        names = "min_tokens", "keep_first", "keep_last"
        least, first, last = (min(share.get(name, 0), capacity) for name in names)
        width = selection_size(capacity, ratio, budget, least, first + last) + newer
        table = prefix.new_empty(layers, batch, *heads, width)
        lengths = prefix.new_empty(batch, *heads)
        places = table.flatten(0, 1), lengths
        together = scores.flatten(0, 1), prefix, ratio, budget, least, first, last, *places
        select_topk(*together, followed=True)
        return table, lengths

    def children(
        self, logits: torch.Tensor, scores: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _chooses(logits, width):
            return super().children(logits, scores, width)
        tokens, paths = _children.children(logits, scores, width)
        return tokens, paths

    def best_children(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        masks: torch.Tensor,
        first: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if not _chooses(logits, width):
            return super().best_children(logits, scores, masks, first, width)
        tokens, best, parents, below = _children.best_children(logits, scores, masks, first, width)
        return tokens, best, parents, below

    def expand_best(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        masks: torch.Tensor,
        first: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if scores.dtype != torch.float32:
            return super().expand_best(tokens, scores, masks, first, width)
        chosen, drafted, best, rows, below = _children.expand_best(
            tokens, scores, masks, first, width
        )
        return chosen, drafted, best, rows, below


def _chooses(logits: torch.Tensor, width: int) -> bool:
    """Whether kernels find the best children by such logits [B, n, V]."""
    return logits.dtype in _DTYPES and logits.stride(-1) == 1 and width <= logits.shape[-1]


def _side_by_side(
    rows: torch.Tensor,
    layers: Sequence[_Layer],
    added: torch.Tensor | None,
    out: torch.Tensor,
    few: bool,
) -> None:
    """Write products [M, N] with weights side by side, plus what is added."""
    done = 0
    for some in _together(layers) if few else ([one] for one in layers):
        part = slice(done, done + sum(len(weight) for weight, _ in some))
        to, residual = out[:, part], None if added is None else added[:, part]
        done = part.stop
        if few:
            linear_parts(rows, [_part(*layer) for layer in some], residual, to)
            continue
        ((weight, bias),) = some
        assert isinstance(weight, torch.Tensor), "codes were widened"
        first = bias if residual is None else residual
        if first is None:
            torch.mm(rows, weight.t(), out=to)
        else:
            torch.addmm(first, rows, weight.t(), out=to)
        if residual is not None and bias is not None:
            to.add_(bias)


def _multiplied(
    rows: torch.Tensor,
    weight: torch.Tensor | QuantisedWeight,
    bias: torch.Tensor | None,
    up: torch.Tensor | QuantisedWeight | None,
    function: str | None,
    added: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write a linear layer of few rows, gated by `up` and finished, by one launch."""
    (first, _, *codes), (second, _, *of_up) = _part(weight, bias), _part(up, None)
    linear_few_rows(rows, first, bias, second, function, added, *codes, *of_up, out)


def _part(
    weight: torch.Tensor | QuantisedWeight | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return a layer as kernels read it: weight or codes, bias, and of codes scale and zero."""
    if isinstance(weight, QuantisedWeight):
        return weight.codes, bias, weight.scale, weight.zero
    return weight, bias, None, None


def _codes(layer: _Layer) -> Any:
    """Return what codes of one launch have in common; None of whole weights."""
    weight, _ = layer
    if not isinstance(weight, QuantisedWeight):
        return None
    return weight.codes.dtype, weight.scale.dtype, weight.scale.shape[1], weight.zero is None


def _together(layers: Sequence[_Layer]) -> Iterator[list[_Layer]]:
    """Yield neighbours that one launch multiplies with."""
    for _, alike in groupby(layers, _laid):
        some = list(alike)
        for first in range(0, len(some), MOST_PARTS):
            yield some[first : first + MOST_PARTS]


def _laid(layer: _Layer) -> tuple[Any, ...]:
    """Return what layers side by side must have in common.

    A size of 1 is a constant to Triton, so such a layer has nothing in common with any.
    """
    weight, bias = layer
    rows = (t.stride(0) for t in _part(*layer) if t is not None and t.dim() == 2)
    return _codes(layer), bias is None, object() if len(weight) == 1 else None, *rows
