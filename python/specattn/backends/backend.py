"""The record that describes a backend."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

Kernel = Callable[..., None]  # takes an operator's arguments and writes into the last ones
# What this copy of the package is called, and its operators in `torch.ops`: two copies in one
# process, of which one was loaded from a folder, have names of their own.
PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]
NAMESPACE = PACKAGE.replace(".", "_")


@dataclass(frozen=True)
class Backend:
    """One implementation of the primitives, for tensors of some device types and dtypes.

    ``why_not(device_type)`` returns why it cannot take such tensors when it is forced, or None;
    ``why_not(None)`` why it cannot be used on this machine. ``find(op)`` returns the kernel of an
    operator, or None, or raises ImportError; a kernel may raise `NotServed` before it has done
    anything.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # of an operator's first argument
    why_not: Callable[[str | None], str | None]
    find: Callable[[str], Kernel | None]
    checks_values: bool = False  # all lengths and indices, before any memory is read
    slow: bool = False  # falling back to it is worth a warning
    # Whether its kernels have not passed ``specattn gpu-check`` on the GPUs that are here.
    is_unproved: Callable[[], bool] = lambda: False
    # Kernels take `form`: equal ones promise tensors of equal shapes, strides, dtypes and devices.
    plans: bool = False
    # Kernels trim a tree's mask to the window where `depths` are None; others need both trimmed.
    trims: bool = False


def operator_named(op: str) -> torch._ops.OpOverload:
    """Return an operator of `torch.ops`."""
    return getattr(getattr(torch.ops, NAMESPACE), op).default


def plain_arguments(op: str) -> list[int]:
    """Return which of an operator's arguments are no tensors."""
    arguments = operator_named(op)._schema.arguments
    return [i for i, argument in enumerate(arguments) if "Tensor" not in str(argument.type)]


def written_arguments(op: str) -> list[int]:
    """Return which of an operator's arguments it writes."""
    arguments = operator_named(op)._schema.arguments
    return [i for i, x in enumerate(arguments) if x.alias_info and x.alias_info.is_write]


def function_named(op: str, package: str) -> Callable | None:
    """Return the function `op` of our package's file of the same name, or None without one."""
    file = f"{PACKAGE}.{package}.{op}"
    try:
        return getattr(importlib.import_module(file), op)
    except ModuleNotFoundError as error:
        if error.name != file:
            raise
        return None
