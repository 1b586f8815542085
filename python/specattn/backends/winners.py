"""The backend that was measured fastest for a shape on this GPU, as bench/winners.py recorded.

The table is in the user's folder for caches. Without one, or on another GPU than the one it was
measured on, backends choose by rules. A call is judged by the measured shape that is nearest in
rows, context and batch.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specattn.files import cache_folder

SCHEMA = 1


class Shape(NamedTuple):
    """What decides how fast a backend is: the kernel's kind, and sizes."""

    op: str
    dtype: str  # of DTYPES
    head_dim: int
    rows: int  # queries that share a KV head: tokens of a request by heads of a group
    context: int  # tokens that a request's cache may hold
    batch: int

    def distance(self, other: Shape) -> float:
        """Return how many times sizes double from one to the other; infinity for other kernels."""
        if self[:3] != other[:3]:
            return math.inf
        pairs = zip(self[3:], other[3:], strict=True)
        return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs)


DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_FARTHEST = 6.0  # doublings: beyond them no measurement is near enough


def path() -> Path:
    """Return where the table is."""
    return cache_folder() / "winners.json"


def winner(gpu: str, shape: Shape) -> str | None:
    """Return the backend that was fastest for the nearest shape, or None where none is near."""
    return _nearest(path(), gpu, shape)


@functools.cache
def _nearest(path: Path, gpu: str, shape: Shape) -> str | None:
    measured = _table(path, gpu)
    nearest = min(measured, key=shape.distance, default=None)
    if nearest is None or shape.distance(nearest) > _FARTHEST:
        return None
    return measured[nearest]


@functools.cache
def _table(path: Path, gpu: str) -> dict[Shape, str]:
    if not path.is_file():
        return {}
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if table["schema"] != SCHEMA or table["gpu"] != gpu:
            return {}
        return {Shape(**row["shape"]): row["winner"] for row in table["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(
            f"specattn: {path} is no table of winners ({error!r}): backends count instead"
        )
        return {}
