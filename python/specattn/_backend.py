"""Which implementation serves a call, and why another does not."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import warnings
from collections.abc import Callable
from types import ModuleType

import torch

_MODULES = {
    "cuda": "specattn._cuda",
    "triton": "specattn.triton_kernels",
    "cpu": "specattn._cpu_backend",
    "reference": "specattn.reference",
}
_PREFERENCE = {"cuda": ("cuda", "triton", "reference"), "cpu": ("cpu", "reference")}
_forced: str | None = None


def backends() -> dict[str, str]:
    """Return every backend's name with "available", or with the reason why it is not.

    Examples
    --------
    >>> import specattn
    >>> specattn.backends()["reference"]
    'available'
    """
    return {name: _why_not(name) or "available" for name in _MODULES}


class use_backend:  # noqa: N801 - reads as the function that it also is
    """Force one backend for the whole process, for good or inside a ``with`` block.

    Parameters
    ----------
    name : {"cuda", "triton", "cpu", "reference"} or None
        None lets the device choose again: CUDA tensors take ``cuda``, else ``triton``; CPU tensors
        take ``cpu``; both fall back to ``reference``.

    Raises
    ------
    ValueError
        There is no backend of that name.
    RuntimeError
        The backend is not available here; the message says why.

    Examples
    --------
    >>> import specattn
    >>> with specattn.use_backend("reference"):
    ...     pass
    """

    def __init__(self, name: str | None):
        global _forced
        if name is not None:
            if name not in _MODULES:
                raise ValueError(f"name: expected one of {', '.join(_MODULES)}, got {name!r}")
            if reason := _why_not(name):
                raise RuntimeError(f"backend {name!r} is not available: {reason}")
        self._previous, _forced = _forced, name

    def __enter__(self) -> use_backend:
        return self

    def __exit__(self, *exception) -> None:
        global _forced
        _forced = self._previous


def kernel(op: str, device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    """Return the function that computes operator `op` and writes into its last arguments.

    No gradient flows through it.

    Raises
    ------
    RuntimeError
        No backend, or not the forced one, serves this operator, device and dtype.
    """
    return _kernel(op, device.type, dtype, _forced)


@functools.cache
def _kernel(op: str, device: str, dtype: torch.dtype, forced: str | None) -> Callable[..., None]:
    candidates = (forced,) if forced else _PREFERENCE.get(device, ())
    reasons: dict[str, str] = {}
    for name in candidates:
        reason = _why_not(name) or _why_not_for(name, op, device, dtype)
        if reason is None:
            if name == "reference" and dtype != torch.float64 and not forced:
                warnings.warn(f"specattn: {op} runs on the slow reference; {reasons}", stacklevel=3)
            return _load(name, op)
        reasons[name] = reason
    raise RuntimeError(f"no backend serves {op} of {dtype} on {device}: {reasons or 'none exists'}")


def checks_values(kernel: Callable[..., None]) -> bool:
    """Return whether a kernel looks at all lengths and indices itself, as the C++ ones do."""
    return kernel.__module__ == _MODULES["cpu"]


def _why_not(name: str) -> str | None:
    """Return why a backend cannot be used on this machine, or None."""
    binary = "specattn._cpu" if name == "cpu" else _MODULES[name]
    if importlib.util.find_spec(binary) is None:
        return f"{binary} is not built"
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if not torch.cuda.is_available() and not _interpreting():
            return "no GPU (TRITON_INTERPRET=1 runs it on the CPU, slowly)"
    return None


def _why_not_for(name: str, op: str, device: str, dtype: torch.dtype) -> str | None:
    """Return why an available backend does not serve this call, or None."""
    if name != "reference" and dtype == torch.float64:
        return "float64 is served by the reference only"
    if name == "cpu" and device != "cpu" or name == "cuda" and device != "cuda":
        return f"it serves {name} tensors only"
    if name == "triton" and device == "cpu" and not _interpreting():
        return "it serves CPU tensors only with TRITON_INTERPRET=1"
    try:
        return None if hasattr(_module(name), op) else f"it has no {op}"
    except ImportError as error:
        return f"it does not import: {error}"


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _module(name: str) -> ModuleType:
    return importlib.import_module(_MODULES[name])


def _load(name: str, op: str) -> Callable[..., None]:
    function = getattr(_module(name), op)
    if name == "cpu":
        return function  # hands over addresses: no gradient can flow, and nothing is to be paid
    return torch.no_grad()(_write_results(function) if name == "reference" else function)


def _write_results(function: Callable) -> Callable[..., None]:
    """Let a function that returns its results write them into extra, last arguments instead.

    On the CPU attention is computed one request at a time: nothing is padded to the longest, and no
    request's rounding depends on its neighbours.
    """
    names = list(inspect.signature(function).parameters)

    def write(*args) -> None:
        inputs = dict(zip(names, args, strict=False))
        outputs = args[len(names) :]
        query = inputs.get("q")
        if query is None or query.is_cuda or len(query) == 1:
            results = function(**inputs)
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
    shared = {"sinks"}
    if inputs.get("block_table") is not None:
        shared |= {"k_cache", "v_cache"}
    return {
        name: value[index : index + 1]
        if isinstance(value, torch.Tensor) and name not in shared and len(value) > 1
        else value
        for name, value in inputs.items()
    }
