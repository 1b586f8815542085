"""Arithmetic on integers and floats: every result is wholly undefined if any operand bit is.

Fused operations are computed in float64 and rounded once more, approximate functions exactly.
"""

import numpy as np

from .faults import Unsupported, expect_qualifiers
from .floats import flush, pack, unpack
from .registers import TYPES, whole

QUALIFIERS = ("rn", "ftz", "sat", "approx", "full", "NaN", "lo", "hi", "wide")
SHORT_FLOATS = ("f16", "bf16", "f16x2", "bf16x2")
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def elementwise(function):
    """Make an instruction of a function of (operands ...) in the type that the mnemonic ends in."""

    def build(instruction, machine):
        parts, kind = instruction.parts, instruction.parts[-1]
        apply = in_type(function, kind, "ftz" in parts)
        if "sat" in parts:
            apply = _saturated(apply, kind)
        return computed(instruction, machine, apply, [kind] * len(instruction.operands[1:]), kind)

    return build


def computed(instruction, machine, apply, kinds, result):
    """Return the closure that reads operands of ``kinds`` and writes ``apply`` of them."""
    expect_qualifiers(instruction, QUALIFIERS)
    registers = machine.registers
    readers = [
        registers.reader(operand, kind)
        for operand, kind in zip(instruction.operands[1:], kinds, strict=True)
    ]
    write, dtype = registers.writer(instruction.operands[0], result), TYPES[result]

    def run(mask, active):
        operands = [read() for read in readers]
        value = apply(*(value for value, _ in operands))
        if value.dtype != dtype:
            value = value.astype(dtype)
        write(value, whole(*(undefined for _, undefined in operands)), mask)

    return run


def in_type(function, kind, ftz):
    """Return ``function`` for operands of a PTX type: short floats are computed in float32."""
    if kind in SHORT_FLOATS:
        return lambda *x: pack(function(*(unpack(v, kind) for v in x)).astype(np.float32), kind)
    if ftz:
        return lambda *x: flush(function(*(flush(v) for v in x)).astype(np.float32))
    if kind[0] == "b":
        raise Unsupported(f"arithmetic on .{kind}")
    return function


def _saturated(apply, kind):
    if kind[0] != "f":
        raise Unsupported(f".sat on .{kind}")
    return lambda *x: np.fmin(np.fmax(apply(*x), 0), 1).astype(TYPES[kind])


def _fma(a, b, c):
    x = a.astype(np.float64)
    x *= b
    x += c
    return x.astype(a.dtype)


def _divide(a, b):
    """Integer division truncates; by zero it is undefined in PTX, here 0."""
    if a.dtype.kind == "f":
        return a / b
    if a.dtype.kind == "u":
        return a // np.where(b == 0, 1, b).astype(a.dtype)
    quotient = np.abs(a.astype(np.int64)) // np.where(b == 0, 1, np.abs(b.astype(np.int64)))
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def _remainder(a, b):
    return (a - _divide(a, b) * b).astype(a.dtype)


def _exact(function):
    return lambda x: function(x.astype(np.float64)).astype(np.float32)


def _minimum(a, b):
    return np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)


def _maximum(a, b):
    return np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


def _extreme(function, with_nan):
    def build(instruction, machine):
        chosen = with_nan if "NaN" in instruction.parts else function
        return elementwise(chosen)(instruction, machine)

    return build


def _multiply(instruction, machine, accumulate=False):
    """Mul and mad: low, high or wide half of integer products; floats plainly."""
    parts, kind = instruction.parts, instruction.parts[-1]
    if kind[0] not in "us":
        return elementwise(_fma if accumulate else np.multiply)(instruction, machine)
    result = WIDE[kind] if "wide" in parts else kind
    wide = TYPES[WIDE.get(kind, kind)]
    if "hi" in parts and kind in ("u64", "s64"):
        raise Unsupported(str(instruction))

    def product(a, b):
        if "wide" in parts:
            return a.astype(wide) * b.astype(wide)
        if "hi" in parts:
            return ((a.astype(wide) * b.astype(wide)) >> 8 * a.itemsize).astype(a.dtype)
        return a * b

    apply = (lambda a, b, c: product(a, b) + c) if accumulate else product
    kinds = [kind, kind, result] if accumulate else [kind, kind]
    return computed(instruction, machine, apply, kinds, result)


def _multiply_add(instruction, machine):
    return _multiply(instruction, machine, accumulate=True)


INSTRUCTIONS = {
    "add": elementwise(np.add),
    "sub": elementwise(np.subtract),
    "mul": _multiply,
    "mad": _multiply_add,
    "fma": elementwise(_fma),
    "div": elementwise(_divide),
    "rem": elementwise(_remainder),
    "neg": elementwise(np.negative),
    "abs": elementwise(np.abs),
    "min": _extreme(_minimum, np.minimum),
    "max": _extreme(_maximum, np.maximum),
    "rcp": elementwise(lambda x: 1 / x),
    "ex2": elementwise(_exact(np.exp2)),
    "lg2": elementwise(_exact(np.log2)),
    "sqrt": elementwise(np.sqrt),
    "rsqrt": elementwise(_exact(lambda x: 1 / np.sqrt(x))),
    "tanh": elementwise(_exact(np.tanh)),
    "sin": elementwise(_exact(np.sin)),
    "cos": elementwise(_exact(np.cos)),
    "copysign": elementwise(lambda sign, x: np.copysign(x, sign)),
}
