"""Backend of the C++ kernels for the CPU."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from .backend import PACKAGE, Backend, Kernel


def _why_not(device: str | None) -> str | None:
    if importlib.util.find_spec(f"{PACKAGE}._cpu") is None:
        return f"{PACKAGE}._cpu is not built"
    return None if device in (None, "cpu") else "it serves CPU tensors only"


def _find(op: str) -> Kernel | None:
    function = getattr(importlib.import_module(f"{PACKAGE}._cpu"), op, None)
    return function and (lambda *args: function(*args, torch.get_num_threads()))


BACKEND = Backend(
    name="cpu",
    devices=("cpu",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    why_not=_why_not,
    find=_find,
    checks_values=True,
)
