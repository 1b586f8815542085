"""The rows of the sweep: which primitive, at which model shape, context and number of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specattn.planning import ModelShape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

EIGHT_BITS = {
    "chain, int8": torch.int8,
    "chain, e4m3": torch.float8_e4m3fn,
    "chain, e5m2": torch.float8_e5m2,
}
"""Chains of rows over caches of 8 bits, by variant."""
LATENTS = "chain, latents"
"""Chains of rows over one head of latents, of which all but a rope's are the values, too."""
ROPE = 64  # columns of a latent that are no values


@dataclass(frozen=True)
class Layer:
    """Weights [outputs, depth]; `gated` twice, a gate and what it is multiplied with."""

    outputs: int
    depth: int
    gated: bool = False
    bits: int | None = None  # of a weight's code; None: weights are numbers
    floats: bool = False  # whether codes are floats of 8 bits, with a scale for each row

    @property
    def products(self) -> int:
        """How many matrices of weights there are."""
        return 2 if self.gated else 1


LAYERS: dict[str, Callable[[ModelShape], Layer]] = {
    "qkv": lambda s: Layer((s.q_heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
    "output": lambda s: Layer(s.hidden, s.q_heads * s.head_dim),
    "gate and up": lambda s: Layer(s.intermediate, s.hidden, gated=True),
    "down": lambda s: Layer(s.hidden, s.intermediate),
    "head": lambda s: Layer(s.vocab, s.hidden),
    "output, int8": lambda s: Layer(s.hidden, s.q_heads * s.head_dim, bits=8),
    "output, int4": lambda s: Layer(s.hidden, s.q_heads * s.head_dim, bits=4),
    "output, fp8": lambda s: Layer(s.hidden, s.q_heads * s.head_dim, bits=8, floats=True),
}
"""The linear layers of a model that a verification pass multiplies with."""


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
        if self.variant not in LAYERS:
            return 0
        layer = LAYERS[self.variant](self.shape)
        return layer.products * layer.outputs * layer.depth


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
