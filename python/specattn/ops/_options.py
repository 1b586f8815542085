"""Checks of options that are numbers, flags or rows, written once for all primitives.

Numbers of NumPy and tensors without dimensions are taken where a number is meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

LARGEST = 2**31 - 1
"""Of what the kernels count in 32 bits."""

_SHOWN = 60  # characters of a value in a message


class Number(NamedTuple):
    """What a number must be: of a type, within limits, and in words."""

    kind: type
    holds: Callable[[Any], bool]
    expected: str
    optional: bool = False


_TOKENS = Number(int, lambda n: n >= 0, "0 or more tokens")

NUMBERS = {
    "window": Number(int, lambda n: n >= 1, "None or at least 1 token", optional=True),
    "softmax_scale": Number(float, lambda x: True, "None or a number", optional=True),
    "query_scale": Number(float, lambda x: True, "None or a number", optional=True),
    "softcap": Number(float, lambda x: 0 <= x < math.inf, "0 or a positive number"),
    "ratio": Number(float, lambda x: 0 < x <= 1, "a share in (0, 1]", optional=True),
    "budget": Number(int, lambda n: n >= 1, "at least 1 token", optional=True),
    "min_tokens": _TOKENS,
    "keep_first": _TOKENS,
    "keep_last": _TOKENS,
    "collect_rows": Number(int, lambda n: True, "integers"),
    "max_seqlen_q": Number(
        int, lambda n: 1 <= n <= LARGEST, "an int of at least 1 with cu_seqlens_q"
    ),
    "k_scale": Number(float, lambda x: True, "None, a number or a tensor", optional=True),
    "v_scale": Number(float, lambda x: True, "None, a number or a tensor", optional=True),
    "seed": Number(int, lambda n: True, "an integer"),
}


def number(name: str, value: Any) -> Any:
    """Return an option as a plain int or float, or None where it may be None.

    Raises
    ------
    TypeError
        It is no such number.
    ValueError
        It is out of range.
    """
    spec = NUMBERS[name]
    if value is None and spec.optional:
        return None
    if type(value) is not spec.kind:
        value = _plain(name, value, spec)
    if not spec.holds(value):
        raise ValueError(f"{name}: expected {spec.expected}, got {_shown(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """Return an option as a bool; raises TypeError where it is none."""
    if value is True or value is False:
        return value
    of_bools = str(getattr(value, "dtype", None)) in ("bool", "torch.bool")
    if of_bools and getattr(value, "ndim", None) == 0:
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {_shown(value)}")


def integers(name: str, value: Any) -> tuple[int, ...]:
    """Return an option as integers; raises TypeError where it is something else."""
    rows = isinstance(value, Iterable) and getattr(value, "ndim", 1) == 1
    if not rows or isinstance(value, (str, bytes)):
        raise TypeError(f"{name}: expected a sequence of integers, got {_shown(value)}")
    return tuple(number(name, one) for one in value)


def _plain(name: str, value: Any, spec: Number) -> Any:
    """Return a number of another type as `spec` wants it."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):  # of a trace
        return value
    found = value
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type != "meta":
        found = value.item()
    wanted = Integral if spec.kind is int else Real
    if isinstance(found, bool) or not isinstance(found, wanted):
        raise TypeError(f"{name}: expected {spec.expected}, got {_shown(value)}")
    try:
        return spec.kind(found)
    except OverflowError:
        raise ValueError(f"{name}: expected {spec.expected}, got {_shown(value)}") from None


def _shown(value: Any) -> str:
    """Return a value as a message shows it, with its type where that says more."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} and shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"
