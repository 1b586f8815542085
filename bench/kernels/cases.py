"""The rows of the sweep: which primitive, at which model shape, context and number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .cost import FORMULAS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MERGED = 8  # states in a merge_states row
PAGED_ONLY = 1 << 20  # tokens from which on nobody keeps a cache in one piece


@dataclass(frozen=True)
class Shape:
    """The attention shape of one layer of a model."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", 32, 8, 128),
        Shape("qwen3-8b", 32, 8, 128),
        Shape("qwen3-30b-a3b", 32, 4, 128),
        Shape("gpt-oss-20b", 64, 8, 64),
        Shape("vicuna-7b", 32, 32, 128),
        Shape("tiny", 8, 2, 64),
    )
}


@dataclass(frozen=True)
class Case:
    """One row of the sweep; ``rows`` is T, ``context`` the cached tokens of each request."""

    op: str
    variant: str
    shape: Shape
    dtype: str
    batch: int
    context: int
    rows: int
    page_size: int = 0  # 0: contiguous
    sparsity: float = 0.07  # share of the context that is selected; Vegas' default

    @property
    def formula(self) -> str:
        """The name of the cost formula: collecting differs from op to variant."""
        joined = f"{self.op}/{self.variant}"
        return joined if joined in FORMULAS else self.op

    @property
    def cache_bytes(self) -> int:
        """K and V of all requests."""
        token = 2 * self.shape.kv_heads * self.shape.head_dim * DTYPES[self.dtype].itemsize
        return self.batch * self.context * token


@dataclass(frozen=True)
class Axes:
    """What is swept."""

    shapes: Sequence[Shape]
    dtypes: Sequence[str]
    batches: Sequence[int]
    contexts: Sequence[int]
    rows: Sequence[int]
    page_sizes: Sequence[int] = (16,)
    sparsities: Sequence[float] = (0.07,)
    collect: Sequence[str] = ("scores", "logits")


def sweep(axes: Axes) -> list[Case]:
    """Return every primitive along the axes.

    Attention over the whole contiguous cache is swept over ``rows``; pages and collection take the
    middle of them, and sparse attention the smallest, which is a draft step.
    """
    few, middle = min(axes.rows), sorted(axes.rows)[len(axes.rows) // 2]
    cases = []
    for shape in axes.shapes:
        for dtype in axes.dtypes:
            for batch in axes.batches:
                case = Case("", "", shape, dtype, batch, 0, middle)
                cases += _without_cache(case, axes.rows)
                for context in axes.contexts:
                    cases += _with_cache(replace(case, context=context), few, axes)
    return cases


def _without_cache(case: Case, rows: Sequence[int]) -> list[Case]:
    return [
        replace(case, op="merge_state", variant="2 states"),
        replace(case, op="merge_states", variant=f"{MERGED} states"),
        *(replace(case, op="tree_attention", variant="tree", rows=t) for t in rows if t > 1),
    ]


def _with_cache(case: Case, few: int, axes: Axes) -> list[Case]:
    paged = [replace(case, page_size=size, variant=f"paged {size}") for size in axes.page_sizes]
    cases = [replace(one, op="hybrid_tree_attention") for one in paged]
    if case.context >= PAGED_ONLY:
        return cases
    contiguous = replace(case, op="hybrid_tree_attention", variant="contiguous")
    cases = [replace(contiguous, rows=t) for t in axes.rows] + cases
    cases += [replace(case, op="verify_attention", variant=v) for v in axes.collect]
    for sparsity in axes.sparsities:
        sparse = replace(case, op="sparse_gather_attention", rows=few, sparsity=sparsity)
        cases += [replace(sparse, variant=v) for v in ("shared", "per head")]
    cases += [replace(case, op="importance_scores", variant="per head")]
    cases += [replace(case, op="select_topk", variant=v) for v in ("shared", "per head")]
    return cases
