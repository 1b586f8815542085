"""Backend of the Triton kernels: for GPUs, and for tests on the CPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import torch

from . import reference
from .backend import Backend, Kernel, function_named, plain_arguments

# Left to the reference, which is torch's own products there.
_PRODUCTS = ("linear_few_rows",)


def _why_not(device: str | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not torch.cuda.is_available():
        return "no GPU (TRITON_INTERPRET=1 runs it on the CPU, slowly)"
    return "it serves CPU tensors only with TRITON_INTERPRET=1" if device == "cpu" else None


def _find(op: str) -> Kernel | None:
    if op in _PRODUCTS:
        product = reference.BACKEND.find(op)
        return product and (lambda *args, form=None: product(*args))
    function = function_named(op, "specattn.triton_kernels")
    if function is None:
        return None
    from specattn.triton_kernels._launch import Prepared  # needs triton, as the function does

    return Prepared(function, plain_arguments(op))


BACKEND = Backend(
    name="triton",
    devices=("cuda",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    why_not=_why_not,
    find=_find,
    plans=True,
    trims=True,
)
