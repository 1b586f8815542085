"""What operands look like: vectors in braces, addresses in brackets."""

import re

import numpy as np

from .faults import Unsupported

ADDRESS = re.compile(r"\[\s*([%\w$.~]+)\s*(?:\+\s*(-?\d+|-?0x[0-9a-fA-F]+))?\s*\]$")


def vector(operand):
    """Return the registers of ``{a, b}``, or of a single operand."""
    if operand.startswith("{"):
        return [name.strip() for name in operand.strip("{} ").split(",")]
    return [operand]


def address(operand, registers):
    """Return a function that returns (int64 addresses, undefined bits) of ``[base + offset]``."""
    match = ADDRESS.match(operand)
    if not match:
        raise Unsupported(f"address {operand!r}")
    base, offset = match[1], int(match[2] or "0", 0)
    if base not in registers.index:
        fixed = np.full(registers.count, registers.constant(base, np.dtype("i8")) + offset)
        return lambda: (fixed, None)
    kind = registers.types[registers.index[base]]
    read = registers.reader(base, f"u{8 * kind.itemsize}")

    wrap = -1 if kind.itemsize == 8 else (1 << 32) - 1  # a window of 32-bit addresses

    def run():
        value, undefined = read()
        return value.astype(np.int64) + offset & wrap, undefined

    return run
