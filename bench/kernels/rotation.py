"""Caches, weights and states at many places of a large memory: every call finds them cold.

A place is used again only after all others, that is after more bytes than the last-level cache
holds. Nothing has to be flushed: the ceiling and the kernels read the same places in turn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from common.clock import plain_read

from .cases import DTYPES, EIGHT_BITS, LATENTS, LAYERS, Case, Layer
from .inputs import Draw, capacity, rows_of_8_bits
from .workloads import BoundCase, build

_BLOCK = 1 << 26  # bytes drawn; the rest of the memory repeats them


class Pool:
    """Memory full of normal values, at least twice as large as the last-level cache."""

    def __init__(self, size: int) -> None:
        block = torch.randn(_BLOCK // 2, dtype=torch.bfloat16)
        # Two bfloat16 normals are one float32 normal: its upper half decides the value.
        self.memory = block.repeat(-(-size // _BLOCK))
        self._block = block
        self._of_8_bits: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    @contextmanager
    def written(self) -> Iterator[None]:
        """Let calls write inside this context: behind it the memory is as it was."""
        try:
            yield
        finally:
            self.memory.view(-1, len(self._block)).copy_(self._block)

    def rows(self, dtype: torch.dtype, heads: int, head_dim: int) -> torch.Tensor:
        """Return the whole memory as [tokens, heads, head_dim]."""
        flat = self.memory.view(dtype)
        token = heads * head_dim
        return flat[: flat.numel() // token * token].view(-1, heads, head_dim)

    def rows_of_8_bits(self, dtype: torch.dtype, heads: int, head_dim: int) -> torch.Tensor:
        """Return about as much memory of such rows, bytes [tokens, heads, head_dim + 4]."""
        kind = dtype, head_dim
        if kind not in self._of_8_bits:
            block = rows_of_8_bits(self.rows(torch.bfloat16, 1, head_dim)[: 1 << 16, 0], dtype)
            self._of_8_bits = {kind: block.repeat(-(-self.memory.nbytes // block.nbytes), 1)}
        rows = self._of_8_bits[kind]
        return rows[: len(rows) // heads * heads].view(-1, heads, head_dim + 4)


class _PlacedDraw(Draw):
    """Takes caches, weights and states from a place of the pool; all else is drawn."""

    def __init__(self, case: Case, place: list[torch.Tensor], seed: int) -> None:
        super().__init__(case, torch.device("cpu"), seed)
        self._place = iter(place)

    def cache(self, used: int) -> torch.Tensor:
        return next(self._place)[:, : capacity(used)]

    def weights(self, layer: Layer) -> list[torch.Tensor]:
        return [next(self._place) for _ in range(layer.products)]

    def matrices(self) -> torch.Tensor:
        return next(self._place)


class Rotation:
    """The places of a layer's weights or states, or of caches for `context` and `rows` tokens.

    `tensors` says what a call reads of a cache: 2 for K and V, 1 for K alone, as it is of latents.
    """

    def __init__(self, pool: Pool, case: Case, tensors: int = 2) -> None:
        shape, tokens = case.shape, capacity(case.context + case.rows)
        tensors = 1 if case.variant == LATENTS else tensors
        if case.variant in LAYERS:
            layer = LAYERS[case.variant](shape)
            rows = pool.rows(DTYPES[case.dtype], 1, layer.depth).squeeze(1)
            form: tuple[int, ...] = (layer.products, layer.outputs)
        elif case.op.startswith("gated_delta"):
            rows = pool.rows(torch.float32, shape.head_dim, shape.head_dim)
            form = (1, case.batch, shape.q_heads)
        elif case.variant in EIGHT_BITS:
            kind = EIGHT_BITS[case.variant]
            rows = pool.rows_of_8_bits(kind, shape.kv_heads, shape.head_dim)
            form = (tensors, 1, tokens)
        else:
            rows = pool.rows(DTYPES[case.dtype], shape.kv_heads, shape.head_dim)
            form = (tensors, 1, tokens)
        step = math.prod(form)
        self.places = [
            rows[i : i + step].unflatten(0, form) for i in range(0, len(rows) - step + 1, step)
        ]
        self._next = itertools.count()

    def workloads(self, case: Case) -> list[BoundCase]:
        """Bind `case` to every place."""
        return [
            build(case, _PlacedDraw(case, [place[0], place[-1]], seed))
            for seed, place in enumerate(self.places)
        ]

    def turn(self, calls: list[Callable]) -> Callable:
        """Return a call that runs at the place after the last one that anybody used."""
        return lambda: calls[next(self._next) % len(calls)]()

    def turn_of(self, works: list[BoundCase]) -> Callable:
        """Return a call that runs a primitive at the next place."""
        return self.turn([work.call for work in works])

    def reads(self) -> list[Callable]:
        """Return a plain read of every place."""
        return [plain_read(place) for place in self.places]

    def rewrites(self) -> list[Callable]:
        """Return a call for every place that reads it and writes it back."""
        from specattn import _cpu  # type: ignore[attr-defined]  # not built on every GPU's machine

        return [
            partial(_cpu.rewrite, place.data_ptr(), place.nbytes, torch.get_num_threads())
            for place in self.places
        ]

    @property
    def place_bytes(self) -> int:
        """What one plain read takes."""
        return self.places[0].nbytes
