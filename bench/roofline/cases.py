"""The rows of the sweep: which primitive, at which model shape, context and number of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .cost import FORMULAS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGE_SIZE = 16
MERGED = 8  # states in a merge_states row


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

    @property
    def formula(self) -> str:
        """The name of the cost formula: collecting differs from op to variant."""
        joined = f"{self.op}/{self.variant}"
        return joined if joined in FORMULAS else self.op


def sweep(shape: Shape, dtype: str, batch: int, contexts: list[int], rows: list[int]) -> list[Case]:
    """Return every primitive at one model shape.

    Attention over the whole cache is swept over ``rows``; the rest takes the middle of them, and
    sparse attention the smallest, which is a draft step.
    """
    few, middle = min(rows), sorted(rows)[len(rows) // 2]
    case = Case("", "", shape, dtype, batch, 0, middle)
    cases = [
        replace(case, op="merge_state", variant="2 states"),
        replace(case, op="merge_states", variant=f"{MERGED} states"),
    ]
    cases += [replace(case, op="tree_attention", variant="tree", rows=t) for t in rows if t > 1]
    for context in contexts:
        at = replace(case, context=context)
        hybrid = replace(at, op="hybrid_tree_attention")
        cases += [replace(hybrid, variant="contiguous", rows=t) for t in rows]
        cases += [replace(hybrid, variant=f"paged {PAGE_SIZE}")]
        cases += [replace(at, op="verify_attention", variant=v) for v in ("scores", "logits")]
        for variant in ("shared", "per head"):
            cases += [replace(at, op="sparse_gather_attention", variant=variant, rows=few)]
        cases += [replace(at, op="importance_scores", variant="per head")]
        cases += [replace(at, op="select_topk", variant=v) for v in ("shared", "per head")]
    return cases
