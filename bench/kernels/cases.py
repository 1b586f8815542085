"""The rows of the sweep: which primitive, at which model shape, context and number of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specattn.planning import ModelShape

from .layers import LAYERS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One row of the sweep; ``rows`` is T, ``context`` the cached tokens of each request."""

    op: str
    variant: str
    shape: ModelShape
    dtype: str
    batch: int
    context: int
    rows: int
    page_size: int = 0  # 0: contiguous
    sparsity: float | None = None  # share of the context that is selected

    @property
    def cache_bytes(self) -> int:
        """K and V of all requests."""
        token = 2 * self.shape.kv_heads * self.shape.head_dim * DTYPES[self.dtype].itemsize
        return self.batch * self.context * token

    @property
    def weights(self) -> int:
        """Elements of the layer that the variant names; 0 where it names none."""
        layer = LAYERS.get(self.variant)
        return layer(self.shape).elements if layer else 0


@dataclass(frozen=True)
class Axes:
    """What is swept."""

    shapes: Sequence[ModelShape]
    dtypes: Sequence[str]
    batches: Sequence[int]
    contexts: Sequence[int]
    rows: Sequence[int]
    page_sizes: Sequence[int] = (16,)
    sparsities: Sequence[float] = (0.07,)
    collect: Sequence[str] = ("scores", "logits")

    def cases(self) -> list[Case]:
        """Return a case per shape, type and batch, at the middle number of rows."""
        middle = sorted(self.rows)[len(self.rows) // 2]
        return [
            Case("", "", *rest, context=0, rows=middle)
            for rest in itertools.product(self.shapes, self.dtypes, self.batches)
        ]
