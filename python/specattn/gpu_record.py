"""What was found out on GPUs: which kernels passed there, and who is fastest for which shape.

`specattn gpu-check` and bench/winners.py write it into the user's folder for caches; what passed on
our own GPUs needs no check. Kernels that have not passed on a GPU's architecture are left to
Triton's there. A call is judged by the measured
shape that is nearest in rows, context and batch, if all of them together double once at most;
where none is near, by `attention_plans`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ._version import __version__
from .files import cache_folder, write_atomically

SCHEMA = 2
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_FARTHEST = 1.0  # doublings
_STEPS = 8  # of a 16-bit type: so many apart may results be that round weights and values to it
_APART = 2e-3  # of results in float32
_EMPTY: dict[str, Any] = {"schema": SCHEMA, "passed": {}, "fastest": {}}
# By capability and Triton: what we have seen pass (docs/benchmarks.md, the GPU suite).
_SEEN = {((9, 0), "3.6"): ("cuda", "gluon", "triton")}


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


def path() -> Path:
    """Return where the record is."""
    return cache_folder() / "gpus.json"


def has_passed(kernels: str, capability: tuple[int, int]) -> bool:
    """Return whether kernels, by their name, passed on GPUs of a compute capability.

    What was checked here decides, if something was.
    """
    here = _read(path())["passed"].get(_key(capability))
    return kernels in (_SEEN.get((capability, triton_version()), ()) if here is None else here)


def note_passed(kernels: Iterable[str], capability: tuple[int, int]) -> None:
    """Record which kernels passed, in place of what an earlier check found."""
    record = _read(path())
    _write(record | {"passed": record["passed"] | {_key(capability): sorted(kernels)}})


def winner(gpu: str, shape: Shape) -> str | None:
    """Return the backend that was fastest for the nearest shape, or None where none is near."""
    rows = _read(path())["fastest"].get(gpu, ())
    measured = {Shape(**row["shape"]): row["winner"] for row in rows}
    nearest = min(measured, key=shape.distance, default=None)
    if nearest is None or shape.distance(nearest) > _FARTHEST:
        return None
    return measured[nearest]


def note_fastest(gpu: str, rows: list[dict[str, Any]]) -> None:
    """Record who was fastest: of each row its ``shape`` and the ``winner``."""
    record = _read(path())
    _write(record | {"fastest": record["fastest"] | {gpu: rows}})


@functools.cache
def triton_version() -> str:
    """Return the first two numbers of Triton's version, which decides what its kernels become."""
    try:
        return ".".join(importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def _key(capability: tuple[int, int]) -> str:
    """Name a compute capability and what decides the kernels' code there."""
    return f"{capability[0]}.{capability[1]}, specattn {__version__}, torch {torch.__version__}"


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return _EMPTY
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != SCHEMA:
            return _EMPTY
        for rows in record["fastest"].values():
            for row in rows:
                _ = Shape(**row["shape"]), row["winner"]
        return _EMPTY | {"passed": dict(record["passed"]), "fastest": record["fastest"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"specattn: {path} is no record of GPUs ({error!r}): it is as if empty")
        return _EMPTY


def _write(record: dict[str, Any]) -> None:
    path().parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(record, indent=1) + "\n"
    write_atomically(path(), lambda partial: partial.write_text(content, encoding="utf-8"))
    _read.cache_clear()


def difference(
    ours: Iterable[torch.Tensor | None], others: Iterable[torch.Tensor | None]
) -> str | None:
    """Return how a kernel's results differ from another backend's, or None; waits for both."""
    for one, other in zip(ours, others, strict=True):
        if one is None or other is None:
            continue
        step = torch.tensor(_APART, dtype=torch.float32, device="cpu")  # 0-dim: of any device
        same = (one == other) | (one != one) & (other != other)
        if one.is_floating_point() and one.numel():
            if one.element_size() == 2:
                largest = torch.where(other.isfinite(), other, 0).abs().amax().float()
                step = _STEPS * torch.finfo(one.dtype).eps * largest
            same |= (one.float() - other.float()).abs() <= step
        if not bool(same.all()):
            count = int((~same).sum())
            return f"{count} of {one.numel()} elements differ from another backend's"
    return None
