"""Backend of the reference: every primitive on every device, slowly."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from ..reference._ragged import shared_by_requests
from .backend import Backend, Kernel, function_named


def _find(op: str) -> Kernel | None:
    function = function_named(op, "reference")
    return function and torch.no_grad()(_write_results(function))


def _write_results(function: Callable) -> Kernel:
    """Wrap a function that returns its results as a kernel that writes them to its last arguments.

    One that writes to its arguments itself returns None.

    On the CPU attention is computed one request at a time: nothing is padded to the longest, and no
    request's rounding depends on its neighbours. Ragged queries the function splits itself.
    """
    names = list(inspect.signature(function).parameters)

    def write(*args) -> None:
        inputs = dict(zip(names, args, strict=False))
        outputs = args[len(names) :]
        query = inputs.get("q")
        ragged = inputs.get("cu_seqlens_q") is not None
        if query is None or query.is_cuda or ragged or len(query) == 1:
            results = function(**inputs)
            if results is None:
                return
            results = results if isinstance(results, tuple) else (results,)
            for output, result in zip(outputs, results, strict=True):
                output.copy_(result)
            return
        for index in range(len(query)):
            request = _request(inputs, index)
            write(*request.values(), *(output[index : index + 1] for output in outputs))

    return write


def _request(inputs: dict, index: int) -> dict:
    """Return the inputs of one request alone; what a batch shares stays as it is."""
    shared = shared_by_requests(inputs)
    return {
        name: value[index : index + 1]
        if isinstance(value, torch.Tensor) and name not in shared and len(value) > 1
        else value
        for name, value in inputs.items()
    }


BACKEND = Backend(
    name="reference",
    devices=("cuda", "cpu"),
    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    why_not=lambda device: None,
    find=_find,
    slow=True,
)
