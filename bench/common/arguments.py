"""Command lines of the benchmarks: a bad argument is one clear line and exit status 2."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch


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


def _listed(
    read: Callable[[str], float],
    allowed: Callable[[float], bool],
    expected: str,
    *,
    one: bool = False,
) -> Callable[[str], list]:
    """Return what parses numbers with commas between them, or a single one."""

    def parse(text: str):
        try:
            values = [read(part) for part in text.lower().split(",")]
        except ValueError:
            values = []
        if not values or not all(map(allowed, values)) or (one and len(values) > 1):
            raise argparse.ArgumentTypeError(f"expected {expected}, got '{text}'")
        return values[0] if one else values

    return parse


def _tokens(text: str) -> int:
    """Read ``8k``: k and m are powers of 1024."""
    unit = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:])
    return int(text[:-1]) * unit if unit else int(text)


numbers = _listed(_tokens, lambda x: x >= 1, "positive numbers such as 8k,32k")
number = _listed(_tokens, lambda x: x >= 1, "one positive number such as 32k", one=True)
shares = _listed(float, lambda x: 0 < x <= 1, "shares such as 0.03,0.07")
temperatures = _listed(float, lambda x: 0 <= x < math.inf, "numbers from 0 such as 0,1")
positive = _listed(float, lambda x: 0 < x < math.inf, "one positive number", one=True)


def device(name: str, parser: Parser) -> torch.device:
    """Return the device of ``--device``; ``auto`` takes a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
