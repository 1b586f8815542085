"""Backend of the C++ kernels for the CPU."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from .backend import PACKAGE, Backend, Kernel, NotServed


def _why_not(device: str | None) -> str | None:
    if importlib.util.find_spec(f"{PACKAGE}._cpu") is None:
        return f"{PACKAGE}._cpu is not built"
    return None if device in (None, "cpu") else "it serves CPU tensors only"


_MOST = 256  # head_dim
_WITH_VALUES = (
    *("hybrid_tree_attention", "verify_attention", "sparse_gather_attention"),
    *("tree_attention", "write_kv"),
)
_WITH_HEADS = (*_WITH_VALUES, "importance_scores", "merge_state", "merge_states")


def _find(op: str) -> Kernel | None:
    function = getattr(importlib.import_module(f"{PACKAGE}._cpu"), op, None)
    if function is None or op not in _WITH_HEADS:
        return function and (lambda *args: function(*args, torch.get_num_threads()))

    def run(*args) -> None:
        D = args[0].shape[-1]
        values = args[1 if op == "write_kv" else 2] if op in _WITH_VALUES else args[0]
        if values is None or values.shape[-1] != D or (D > _MOST and op != "write_kv"):
            raise NotServed("values that are no part of their own, or another head_dim")
        function(*args, torch.get_num_threads())

    return run


BACKEND = Backend(
    name="cpu",
    devices=("cpu",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    why_not=_why_not,
    find=_find,
    checks_values=True,
)
