"""Command lines of the benchmarks: a bad argument is one clear line and exit status 2."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Argparse without the usage text before an error."""

    @contextmanager
    def refusing(self, option: str = "") -> Iterator[None]:
        """Leave with status 2 and one line, begun by `option`, where what is asked cannot be."""
        try:
            yield
        except (ValueError, RuntimeError, OSError) as failure:
            self.error(option + " ".join(str(failure).split()))

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with status 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def numbers(text: str) -> list[int]:
    """Parse ``8k,32k``: positive integers, k and m being powers of 1024."""
    units = {"k": 1 << 10, "m": 1 << 20}
    try:
        values = [
            int(part[:-1]) * units[part[-1]] if part[-1:] in units else int(part)
            for part in text.lower().split(",")
        ]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers such as 8k,32k, got '{text}'")
    return values


def number(text: str) -> int:
    """Parse one positive integer, such as ``32k``."""
    return _only(numbers(text), text)


def shares(text: str) -> list[float]:
    """Parse ``0.03,0.07``: parts of a whole, above 0 and at most 1."""
    return _floats(text, lambda value: 0 < value <= 1, "shares such as 0.03,0.07")


def temperatures(text: str) -> list[float]:
    """Parse ``0,1``: finite numbers from 0."""
    return _floats(text, lambda value: 0 <= value < math.inf, "numbers from 0 such as 0,1")


def positive(text: str) -> float:
    """Parse a finite number above zero."""
    values = _floats(text, lambda value: 0 < value < math.inf, "a positive number")
    return _only(values, text)


def _only(values: list[T], text: str) -> T:
    if len(values) > 1:
        raise argparse.ArgumentTypeError(f"expected one number, got '{text}'")
    return values[0]


def _floats(text: str, allowed: Callable[[float], bool], expected: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(map(allowed, values)):
        raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'")
    return values


def device(name: str, parser: Parser) -> torch.device:
    """Return the device of ``--device``; ``auto`` takes a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
