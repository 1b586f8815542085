"""Backend of the Triton kernels: for GPUs, and for tests on the CPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import sys

import torch

from ..call_forms import NotServed
from .backend import Backend, Kernel, function_named, operator_named, plain_arguments


def _why_not(device: str | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not torch.cuda.is_available():
        return "no GPU (TRITON_INTERPRET=1 runs it on the CPU, slowly)"
    return "it serves CPU tensors only with TRITON_INTERPRET=1" if device == "cpu" else None


def _views(op: str) -> list[tuple[int, int]]:
    """Return the places of two arguments that may begin at one address.

    Values may be views of their keys, and what is added last may be where the result goes.
    """
    places = {x.name: place for place, x in enumerate(operator_named(op)._schema.arguments)}
    pairs = (
        ("k_cache", "v_cache"), ("k_tree", "v_tree"), ("k_new", "v_new"), ("residual", "out"),
    )  # fmt: skip
    return [(places[a], places[b]) for a, b in pairs if a in places and b in places]


def _find(op: str) -> Kernel | None:
    function = function_named(op, "triton_kernels")
    if function is None:
        return None
    from ..triton_kernels._launch import Prepared  # needs triton, as the function does

    prepared = Prepared(function, plain_arguments(op), _views(op))
    why_not = getattr(sys.modules[function.__module__], "not_served", None)
    if why_not is None:
        return prepared

    def kernel(*args, form: object = None) -> None:
        if reason := why_not(*args):
            raise NotServed(reason)
        prepared(*args, form=form)

    return kernel


BACKEND = Backend(
    name="triton",
    devices=("cuda",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    why_not=_why_not,
    find=_find,
    plans=True,
    trims=True,
)
