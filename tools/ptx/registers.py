"""Registers as arrays over all threads of a wave, each with the bits that have no value yet.

``values[i]`` is an array with one element per thread and is never changed in place, so that a move
is an alias. ``undefined[i]`` is None, or an array of bits that are 1 where the register's bit has
no value. The rule is that of valgrind's memcheck: moving and computing carry undefined bits along,
and only what they decide is an error (a branch, a guard, an address, a store to global memory).
"""

import re

import numpy as np

from .faults import Fault, Unsupported
from .memory import UNSIGNED
from .parser import SIZES

IMMEDIATE = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")
TYPES = {name: np.dtype(f"{'u' if name[0] == 'b' else name[0].replace('s', 'i')}{size}")
         for name, size in SIZES.items() if name not in ("pred", "f8", "f16")}  # fmt: skip
TYPES |= {"f16": np.dtype("u2"), "bf16": np.dtype("u2"), "f16x2": np.dtype("u4")}
TYPES |= {"bf16x2": np.dtype("u4"), "tf32": np.dtype("u4"), "pred": np.dtype(bool)}


def _bits(kind):
    return np.dtype(UNSIGNED[kind.itemsize]) if kind.kind == "f" else kind


def whole(*undefined):
    """Return which elements have any undefined bit, bool or None; the rule for arithmetic."""
    total = None
    for bits in undefined:
        if bits is not None:
            total = bits != 0 if total is None else total | (bits != 0)
    return total


def _merged(old, new, mask):
    merged = old.copy()
    np.copyto(merged, new, where=mask)
    return merged


class Registers:
    """The register file of a wave of ``count`` threads."""

    def __init__(self, declared, count, symbols):
        self.count = count
        self.index = {name: i for i, name in enumerate(declared)}
        # As NVRTC declares them; their bits are kept, whatever they hold.
        self.types = [_bits(TYPES[kind]) for kind in declared.values()]
        self.symbols = symbols  # names of variables, to their addresses
        self.special = {}  # names such as %tid.x, to arrays
        self.values, self.undefined = [], []
        self.reset()

    def reset(self):
        """Forget all values; the lists stay, since decoded instructions hold them."""
        self.values[:] = [np.zeros(self.count, kind) for kind in self.types]
        self.undefined[:] = [np.full(self.count, self._all(kind)) for kind in self.types]

    @staticmethod
    def _all(kind):
        return np.True_ if kind.kind == "b" else ~np.zeros((), kind)

    def reader(self, operand, kind):
        """Return a function that returns (values, undefined bits or None) of a source operand.

        Values have the numpy type of the PTX type ``kind``; undefined bits are unsigned, or bool.
        """
        dtype = TYPES[kind]
        if operand in self.index:
            return self._register_reader(self.index[operand], dtype)
        if operand[0] == "%":
            return lambda: (self.special_value(operand).astype(dtype), None)
        constant = np.full(self.count, self.constant(operand, dtype), dtype)
        constant.flags.writeable = False
        return lambda: (constant, None)

    def special_value(self, name):
        """Return the array of a special register."""
        if name not in self.special:
            raise Unsupported(f"special register {name}")
        return self.special[name]

    def _register_reader(self, i, dtype):
        values, undefined, own = self.values, self.undefined, self.types[i]
        if own == dtype:
            return lambda: (values[i], undefined[i])
        if own.itemsize == dtype.itemsize and bool not in (own, dtype):
            return lambda: (values[i].view(dtype), undefined[i])
        if own.itemsize < dtype.itemsize or bool in (own, dtype):
            raise Unsupported(f"a {own} register is read as {dtype}")
        narrow = UNSIGNED[dtype.itemsize]

        def low_part():
            bits = undefined[i]
            bits = bits if bits is None else bits.astype(narrow)
            return values[i].astype(narrow).view(dtype), bits

        return low_part

    def constant(self, operand, dtype):
        """Return the value of an immediate operand or of a variable's name."""
        if operand[:2] in ("0f", "0F", "0d", "0D"):
            bits = int(operand[2:], 16)
            value = np.array([bits], "u4" if operand[1] in "fF" else "u8")
            if value.itemsize == dtype.itemsize:
                return value.view(dtype)[0]
            raise Unsupported(f"immediate {operand} as {dtype}")
        if operand in self.symbols:
            return np.array(self.symbols[operand]).astype(dtype)
        if not IMMEDIATE.match(operand):
            raise Unsupported(f"operand {operand!r}")
        text = operand.rstrip("U")
        octal = re.match(r"-?0\d+$", text)
        value = int(text, 8) if octal else int(text, 0)
        if dtype.kind == "b":
            return value != 0
        if dtype.kind == "f":
            return dtype.type(value)
        bits = 8 * dtype.itemsize
        return np.array(value & ((1 << bits) - 1), f"u{dtype.itemsize}").view(dtype)

    def writer(self, operand, kind):
        """Return a function (values, undefined, mask) that writes a destination operand.

        ``undefined`` is None, bool per element (the whole element), or bits as the values' width.
        """
        if operand == "_":
            return lambda value, undefined, mask: None
        if operand not in self.index:
            raise Unsupported(f"destination {operand!r}")
        i, dtype = self.index[operand], TYPES[kind]
        own = self.types[i]
        if bool in (own, dtype):
            if own != dtype:
                raise Unsupported(f"a {own} register is written as {dtype}")
            return lambda value, undefined, mask: self.put(i, value, undefined, mask)
        signed = dtype.kind == "i"
        wide, every = np.dtype(f"i{own.itemsize}") if signed else own, self._all(own)
        if dtype.itemsize > own.itemsize:
            raise Unsupported(f"a {own} register is written as {dtype}")

        def write(value, undefined, mask):
            bits = undefined
            if bits is not None and bits.dtype == bool:
                bits = bits if mask is None else bits & mask
                bits = bits * every if np.count_nonzero(bits) else None
            elif bits is not None and bits.dtype != own:
                bits = (bits.view(dtype) if signed else bits).astype(wide).view(own)
            if value.dtype.itemsize != own.itemsize:
                value = (value.view(dtype) if signed else value).astype(wide)
            self.put(i, value.view(own), bits, mask)

        return write

    def put(self, i, value, bits, mask):
        """Write register ``i`` where ``mask`` (None: everywhere)."""
        if mask is not None:
            value, old = _merged(self.values[i], value, mask), self.undefined[i]
            if bits is not None or old is not None:
                none = np.zeros(self.count, self.types[i])
                bits = _merged(none if old is None else old, none if bits is None else bits, mask)
        # Of numpy's ways to look for any bit this is the quickest, here and on every hot path.
        if bits is not None and not np.count_nonzero(bits):
            bits = None
        self.values[i], self.undefined[i] = value, bits

    def decided(self, undefined, active, what):
        """Fail if a value that decides something is undefined in an active thread."""
        if undefined is None:
            return
        bad = undefined != 0 if active is None else (undefined != 0) & active
        if np.count_nonzero(bad):
            threads = np.flatnonzero(bad)
            raise Fault(
                "undefined", f"{what} is undefined in {len(threads)} threads, first {threads[0]}"
            )
