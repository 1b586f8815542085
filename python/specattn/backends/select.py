"""Chooses the backend that serves a call, and says why another does not."""

from __future__ import annotations

import functools
import warnings

import torch

from ..call_forms import NotServed
from .backend import Backend, Kernel

# In the order of preference: the first that serves a call is taken. Those that are unproved here
# come behind the others, but before slow ones. The package enters them: a backend asks this file.
BACKENDS = dict[str, Backend]()
_forced: str | None = None


def backends() -> dict[str, str]:
    """Return every backend's name with "available", or with the reason why it is not.

    Returns
    -------
    dict of str to str

    Examples
    --------
    >>> import specattn
    >>> specattn.backends()["reference"]
    'available'
    """
    return {name: backend.why_not(None) or "available" for name, backend in BACKENDS.items()}


class use_backend:  # noqa: N801 - reads as the function that it also is
    """Force one backend for the whole process, for good or inside a ``with`` block.

    Parameters
    ----------
    name : str or None
        A name that `backends` lists. None lets the tensors choose again: the first backend in that
        order that serves their device and dtype.

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
            if name not in BACKENDS:
                raise ValueError(f"name: expected one of {', '.join(BACKENDS)}, got {name!r}")
            if reason := BACKENDS[name].why_not(None):
                raise RuntimeError(f"backend {name!r} is not available: {reason}")
        self._previous, _forced = _forced, name

    def __enter__(self) -> use_backend:
        return self

    def __exit__(self, *exception) -> None:
        global _forced
        _forced = self._previous


def is_forced(name: str) -> bool:
    """Return whether `use_backend` has forced a backend."""
    return _forced == name


def chosen(
    op: str, device: torch.device, dtype: torch.dtype, declined: tuple[tuple[str, str], ...] = ()
) -> tuple[Kernel, Backend]:
    """Return the kernel of operator `op` and its backend.

    No gradient flows through a kernel. `declined` are backends that do not serve the call, each
    with its reason. Raises RuntimeError where no backend, or not the forced one, serves it.
    """
    return _chosen(op, device.type, dtype, _forced, declined)


def run_beside(name: str, op: str, *args) -> None:
    """Run an operator on the best of the other backends for backend `name`, forced or not."""
    declined: tuple[tuple[str, str], ...] = ((name, "it is excluded"),)
    while True:
        kernel, backend = _chosen(op, args[0].device.type, args[0].dtype, None, declined)
        try:
            kernel(*args)
            return
        except NotServed as reason:
            declined = (*declined, (backend.name, f"it does not serve {reason}"))


@functools.cache
def _chosen(
    op: str,
    device: str,
    dtype: torch.dtype,
    forced: str | None,
    declined: tuple[tuple[str, str], ...],
) -> tuple[Kernel, Backend]:
    candidates = [BACKENDS[forced]] if forced else _preferred(device, dtype)
    reasons = dict(declined)
    for backend in candidates:
        if backend.name in reasons:
            continue
        kernel, reason = _find(backend, op, device, dtype)
        if kernel:
            if reasons and backend.slow:
                warnings.warn(
                    f"specattn: {op} runs on the slow {backend.name}; {reasons}", stacklevel=3
                )
            return kernel, backend
        reasons[backend.name] = reason
    raise RuntimeError(f"no backend serves {op} of {dtype} on {device}: {reasons or 'none exists'}")


def _preferred(device: str, dtype: torch.dtype) -> list[Backend]:
    """Return the backends for a device and dtype, best first."""
    serving = [b for b in BACKENDS.values() if device in b.devices and dtype in b.dtypes]
    return sorted(serving, key=lambda b: (b.slow, b.is_unproved()))


def _find(backend: Backend, op: str, device: str, dtype: torch.dtype) -> tuple[Kernel | None, str]:
    """Return a backend's kernel for a call, or None and the reason why it has none."""
    if reason := backend.why_not(device):
        return None, reason
    if dtype not in backend.dtypes:
        others = [b.name for b in BACKENDS.values() if dtype in b.dtypes]
        return None, f"{dtype} is served by {' and '.join(others) or 'no backend'} only"
    try:
        return backend.find(op), f"it has no {op}"
    except ImportError as error:
        return None, f"it does not import: {error}"
