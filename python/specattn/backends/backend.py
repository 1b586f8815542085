"""What is known of a backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

Kernel = Callable[..., None]  # takes an operator's arguments and writes into the last ones


class NotServed(Exception):  # noqa: N818 - no error: the next backend takes the call
    """A kernel does not serve a call: nothing has happened, and the message says why."""


@dataclass(frozen=True)
class Backend:
    """One implementation of the primitives.

    Parameters
    ----------
    name : str
        As `use_backend` takes it.
    devices : tuple of str
        Device types whose tensors it is chosen for.
    dtypes : tuple of torch.dtype
        Dtypes of an operator's first argument that it computes in.
    why_not : callable
        Returns why the backend cannot be used on this machine, or None; given a device type, also
        why it cannot take that device's tensors when it is forced.
    find : callable
        Returns the kernel of the operator of a given name, or None; may raise ImportError. A kernel
        may raise `NotServed` before it has done anything.
    checks_values : bool
        Whether its kernels check all lengths and indices before they read any memory.
    slow : bool
        Whether falling back to it is worth a warning.
    plans : bool
        Whether its kernels take `form`: equal ones promise tensors of equal shapes, strides, dtypes
        and devices, so that what follows from those is found once.
    trims : bool
        Whether its kernels trim a tree's mask to the window where `depths` are None. Others take a
        trimmed mask and the depths before that.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    why_not: Callable[[str | None], str | None]
    find: Callable[[str], Kernel | None]
    checks_values: bool = False
    slow: bool = False
    plans: bool = False
    trims: bool = False


def function_named(op: str, package: str) -> Callable | None:
    """Return the function `op` of the package's file of the same name, or None without one."""
    file = f"{package}.{op}"
    try:
        return getattr(importlib.import_module(file), op)
    except ModuleNotFoundError as error:
        if error.name != file:
            raise
        return None
