"""Backend of the CUDA C++ kernels in csrc/cuda, compiled by NVRTC through CuPy at first use."""

from __future__ import annotations

import importlib.util

import torch

from ... import gpu_record
from ..backend import Backend, Kernel, plain_arguments


def _why_not(device: str | None) -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (cupy-cuda12x or cupy-cuda13x, as torch's CUDA)"
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.version.hip:
        return "it is written for NVIDIA's GPUs"
    if torch.cuda.get_device_capability()[0] < 8:
        return "it needs compute capability 8.0"
    return "it serves CUDA tensors only" if device == "cpu" else None


def _find(op: str) -> Kernel | None:
    from . import attention, merging, selection  # whose planners are called as the operators
    from .launch import Planned

    for module in (attention, merging, selection):
        if planner := getattr(module, op, None):
            return Planned(op, planner, plain_arguments(op))
    return None


def _is_unproved() -> bool:
    count = torch.cuda.device_count()
    here = {torch.cuda.get_device_capability(index) for index in range(count)}
    return not all(gpu_record.has_passed("cuda", capability) for capability in here)


BACKEND = Backend(
    name="cuda",
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    why_not=_why_not,
    find=_find,
    is_unproved=_is_unproved,
    plans=True,
    trims=True,
)
