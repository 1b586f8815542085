"""Command lines of the benchmarks: a bad argument is one clear line and exit status 2."""

from __future__ import annotations

import argparse
import math
import sys
from typing import NoReturn

import torch


class Parser(argparse.ArgumentParser):
    """Argparse without the usage text before an error."""

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
    values = numbers(text)
    if len(values) > 1:
        raise argparse.ArgumentTypeError(f"expected one number, got '{text}'")
    return values[0]


def shares(text: str) -> list[float]:
    """Parse ``0.03,0.07``: parts of a whole, above 0 and at most 1."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if not all(0 < value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"expected shares such as 0.03,0.07, got '{text}'")
    return values


def positive(text: str) -> float:
    """Parse a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got '{text}'")
    return value


def device(name: str, parser: Parser) -> torch.device:
    """Return the device of ``--device``; ``auto`` takes a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
