"""Blocks as C++ kernel calls over memory that is used again, for any number of rows on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import specattn._cpu as _cpu
from specattn.blocks.gated_delta import Gates
from specattn.blocks.operands import Norm, Place, Projection, Rotation, Store
from specattn.blocks.ops import ACTIVATIONS, Ops
from specattn.quantised import QuantisedWeight

MOST_ROWS = 128
"""Rows of a recorded pass, all requests together; other products are better for more."""

_FAST: dict[str, tuple[torch.dtype, ...]] = {
    "amx": (torch.float32, torch.bfloat16, torch.float16),
    "amx_fp16": (torch.float32, torch.bfloat16, torch.float16),
    "avx512_bf16": (torch.float32, torch.bfloat16),
}


def widens(dtype: torch.dtype) -> bool:
    """Whether products in float32 are faster: without a matrix unit, or fast pairwise products."""
    return dtype not in _FAST.get(_cpu.isa(), (torch.float32,))


def _by_panels(x: torch.Tensor) -> bool:
    """Whether our products of many rows are faster than torch's on this machine."""
    return x.dtype == torch.bfloat16 and x.shape[-1] % 2 == 0 and _cpu.by_panels()


class Memory:
    """What recordings of one owner compute in: none of them runs while another's results count.

    Memory that no recording touches is none.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    def rows(self, what: str, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` rows for a kind of result, [count, width]; the same ones every time."""
        key = what, width, dtype
        if key not in self._known or len(self._known[key]) < count:
            most = max(MOST_ROWS, 1 << (count - 1).bit_length())
            self._known[key] = torch.empty(most, width, dtype=dtype, device="cpu")
        return self._known[key][:count]


class Kernels(Ops):
    """The operators of blocks as kernel calls; products are torch's, but for some of bfloat16.

    Each reads and writes its rows once, where torch's operators do so for every step.
    """

    def __init__(self, memory: Memory):
        self.memory = memory

    def kernel(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a kernel of `specattn._cpu`, by position."""
        function(*arguments, torch.get_num_threads())

    def python(self, function: Callable[[], Any]) -> None:
        """Run a function."""
        function()

    def rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = self._rows("rows", index, x.shape[-1], x.dtype)
        self.kernel(_cpu.embed, index, x.flatten(0, -2), out.flatten(0, -2))
        return out

    def norm(self, x: torch.Tensor, norm: Norm, *, keep: bool = False) -> torch.Tensor:
        out = self._rows("normed", x[..., 0], x.shape[-1], x.dtype, keep)
        self._norm(x.flatten(0, -2), norm, out.flatten(0, -2))
        return out

    def norm_parts(self, x: torch.Tensor, *parts: tuple[int, Norm | None]) -> torch.Tensor:
        pieces = x.flatten(0, -2).split([width for width, _ in parts], -1)
        for piece, (_, norm) in zip(pieces, parts, strict=True):
            if norm is not None:
                self._norm(piece, norm, piece)
        return x

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
        if activation is None and _by_panels(x):
            return self._panels(x, projections, gate, residual, keep, into)
        kind = torch.float32 if widens(x.dtype) else x.dtype
        rows = self._as("read", x.flatten(0, -2), kind)
        sizes = [len(one.weight) for one in projections]
        out = self._rows("product", x[..., 0], sum(sizes), kind, keep)
        columns = out.flatten(0, -2).split(sizes, 1)
        for (weight, bias), part in zip(projections, columns, strict=True):
            columns_of = self._whole(weight, kind).t()
            if bias is None:
                torch.mm(rows, columns_of, out=part)
            else:
                torch.addmm(bias.to(kind), rows, columns_of, out=part)
        if gate is not None:
            gated = self._rows("gated", x[..., 0], sizes[0], x.dtype, keep)
            self.kernel(_cpu.gate, *columns, gate, gated.flatten(0, -2))
            out = gated
        if activation is not None:
            out = ACTIVATIONS[activation](out)
        if into is not None:
            return into.copy_(out)
        if residual is not None and not keep:
            return residual.add_(out)
        out = out if residual is None else residual + out
        return out.to(x.dtype) if keep else self._as("narrow", out, x.dtype)

    def _panels(
        self,
        x: torch.Tensor,
        projections: Sequence[Projection],
        gate: str | None,
        residual: torch.Tensor | None,
        keep: bool,
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what `linear` does by one call, with all that follows the products."""
        weights = [
            self._whole(one.weight, x.dtype, f"weight {n}") for n, one in enumerate(projections)
        ]
        width = len(weights[0]) if gate is not None else sum(map(len, weights))
        out = residual if into is None else into
        if out is None or keep:
            what = "product" if gate is None else "gated"
            out = self._rows(what, x[..., 0], width, x.dtype, keep)
        added = None if residual is None else residual.flatten(0, -2)
        biases = [one.bias for one in projections]
        of_rows = x.flatten(0, -2), weights, biases, gate, added, out.flatten(0, -2)
        self.kernel(_cpu.linear_many_rows, *of_rows)
        return out

    def by_head(
        self, x: torch.Tensor, weight: torch.Tensor, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        heads, width, _ = weight.shape
        behind = 0 if beside is None else beside.shape[-1]
        out = self._rows("by head", x[..., 0, 0], heads * (width + behind), x.dtype)
        out = out.unflatten(-1, (heads, -1))
        product, room = out.flatten(0, 1).split([width, behind], -1)
        for n, of_head in enumerate(weight):
            read = x[:, :, n].flatten(0, 1), [of_head], [None], None, None
            self.kernel(_cpu.linear_parts, *read, product[:, n])
        if beside is not None:
            rows = beside.flatten(0, 1)
            self.python(lambda: room.copy_(rows))
        return out

    def gate(self, x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
        out = self._rows("gated", x[..., 0], x.shape[-1], x.dtype)
        rows = (gate.flatten(0, -2), x.flatten(0, -2))
        self.kernel(_cpu.gate, *rows, activation, out.flatten(0, -2))
        return out

    def gates(
        self, b: torch.Tensor, a: torch.Tensor, gates: Gates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        g, beta = (self._rows(what, b[..., 0], b.shape[-1], torch.float32) for what in ("g", "b"))
        b, a, *out = (x.flatten(0, -2) for x in (b, a, g, beta))
        self.kernel(_cpu.delta_gates, b, a, *gates, *out)
        return g, beta

    def in_place(self, x: torch.Tensor, function: Callable[[torch.Tensor], object]) -> torch.Tensor:
        self.python(lambda: function(x))
        return x

    def add(
        self, x: torch.Tensor, added: torch.Tensor, factor: float = 1.0, norm: Norm | None = None
    ) -> torch.Tensor:
        added = added if norm is None else self.norm(added, norm)
        self.python(lambda: x.add_(added, alpha=factor))
        return x

    def rotate(
        self,
        heads: torch.Tensor,
        q_heads: int,
        place: Rotation,
        *,
        norms: tuple[Norm | None, Norm | None] = (None, None),
        store: Store | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert isinstance(place, Place)
        weights = [None if norm is None else norm.weight.detach() for norm in norms]
        eps = next((norm.eps for norm in norms if norm is not None), 0.0)
        to: Any = (None,) * 5
        if store is not None:
            to = (*store.memory, *store.scales, store.slot)
        self.kernel(_cpu.rotate_heads, heads, q_heads, *weights, eps, *place, *to)
        kv_heads = (heads.shape[2] - q_heads) // 2
        q, k, v = heads.split([q_heads, kv_heads, kv_heads], 2)
        return q, k, v

    def write_rows(
        self, x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: Any = None
    ) -> None:
        self.kernel(_cpu.write_kv, x, None, cache, None, slots, None, None, scale, None)

    def _rows(
        self, what: str, like: torch.Tensor, width: int, dtype: torch.dtype, keep: bool = False
    ) -> torch.Tensor:
        """Return memory for rows [B, T, width], of which `like` has the first dimensions."""
        if keep:
            return torch.empty(*like.shape, width, dtype=dtype, device="cpu")
        return self.memory.rows(what, like.numel(), width, dtype).view(*like.shape, width)

    def _as(self, what: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return x in a dtype: in memory for such, unless it is its own."""
        return x if x.dtype == dtype else self._rows(what, x[..., 0], x.shape[-1], dtype).copy_(x)

    def _whole(
        self, weight: torch.Tensor | QuantisedWeight, dtype: torch.dtype, what: str = "weight"
    ) -> torch.Tensor:
        """Return weights in a dtype: in memory for `what` they are, unless it is their own."""
        if not isinstance(weight, QuantisedWeight):
            return self._as(what, weight.detach(), dtype)
        room = self.memory.rows(what, len(weight), weight.depth, dtype)
        return weight.dequantised(dtype, out=room)

    def _norm(self, x: torch.Tensor, norm: Norm, out: torch.Tensor) -> None:
        self.kernel(_cpu.rms_norm, x, norm.weight.detach(), norm.eps, out)
