"""Warp matrices: ldmatrix, stmatrix and mma.sync, all warps at once.

Fragments follow the PTX manual: of a tile of 8 rows, lane ``l`` holds row ``l // 4`` and the 32
bits of column ``l % 4``. Products and sums are made in float64 and rounded to float32 once per
instruction; a result is undefined where an operand of its row or column is.
"""

import re

import numpy as np

from .faults import Unsupported
from .floats import SHORT, to_tf32
from .operands import vector
from .transfers import Place


class Fragments:
    """Registers of a matrix operand; ``kind`` is its element type, None where only bits move."""

    def __init__(self, operand, machine, kind=None):
        self.readers = [machine.registers.reader(name, "b32") for name in vector(operand)]
        self.kind, self.machine = kind, machine

    def read(self):
        """Return (values, undefined or None), each [warps, registers, 32 lanes, elements]."""
        values, shadows = zip(*(read() for read in self.readers), strict=True)
        values = self._elements(np.stack(values, 0))
        undefined = None
        if any(shadow is not None for shadow in shadows):
            nothing = np.zeros(self.machine.count, np.uint32)
            bits = np.stack([nothing if s is None else s for s in shadows], 0)
            if self.kind in SHORT:
                bits = bits.view(np.uint16)
            undefined = self._by_warp(bits != 0)
        return values, undefined

    def _elements(self, bits):
        if self.kind in SHORT:
            return self._by_warp(SHORT[self.kind][0](bits.view(np.uint16)))
        return self._by_warp(to_tf32(bits) if self.kind == "tf32" else bits.view(np.float32))

    def _by_warp(self, x):
        x = x.reshape(len(self.readers), self.machine.warps, 32, -1)
        return x.transpose(1, 0, 2, 3)


def tile_a(x):
    """Return A [warps, 16, K] from fragments: registers go down the rows, then along K."""
    warps, registers, _, elements = x.shape
    x = x.reshape(warps, registers // 2, 2, 8, 4, elements).transpose(0, 2, 3, 1, 4, 5)
    return x.reshape(warps, 16, -1)


def tile_b(x):
    """Return B transposed [warps, 8, K] from fragments: registers go along K."""
    warps, registers, _, elements = x.shape
    return (
        x.reshape(warps, registers, 8, 4, elements).transpose(0, 2, 1, 3, 4).reshape(warps, 8, -1)
    )


def tile_c(x):
    """Return C [warps, 16, 8 * n] from four float32 registers per 8 columns."""
    warps, registers = x.shape[:2]
    x = x.reshape(warps, registers // 4, 2, 2, 8, 4).transpose(0, 2, 4, 1, 5, 3)
    return x.reshape(warps, 16, -1)


def fragments_c(tile):
    """Return registers [n, warps * 32] of C [warps, 16, 8 * n / 4]; the inverse of `tile_c`."""
    warps, _, columns = tile.shape
    x = tile.reshape(warps, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return np.ascontiguousarray(x).reshape(columns // 2, warps * 32)


CUT = 8  # products that are added before a sum is cut off


def product(a, b, c, cut=False):
    """Return a @ b^T + c in float32, batched; each operand is (values, undefined or None).

    With ``cut`` every sum of 8 products is cut off to float32, as coarse as tensor cores may be.
    """
    left, right = a[0].astype(np.float64), b[0].astype(np.float64).swapaxes(-1, -2)
    total = 0.0 if c is None else c[0].astype(np.float64)
    step = CUT if cut else left.shape[-1]
    for k in range(0, left.shape[-1], step):
        total = total + left[..., k : k + step] @ right[..., k : k + step, :]
        if cut:
            total = _cut_off(total)
    undefined = None
    if any(x is not None and x[1] is not None for x in (a, b, c)):
        undefined = np.zeros(total.shape, bool)
        if a[1] is not None:
            undefined |= a[1].any(-1)[..., :, None]
        if b[1] is not None:
            undefined |= b[1].any(-1)[..., None, :]
        if c is not None and c[1] is not None:
            undefined |= c[1]
    return total.astype(np.float32), undefined


def _cut_off(x):
    """Return the float32 nearest to each number that is not farther from 0 than it."""
    y = x.astype(np.float32)
    return np.where(np.abs(y) > np.abs(x), np.nextafter(y, np.float32(0)), y).astype(np.float64)


def multiply(instruction, machine):
    """mma.sync with float32 accumulators."""
    shape = re.search(r"\.(m16n8k\d+)\.row\.col\.f32\.(\w+)\.(\w+)\.f32$", instruction.name)
    if not shape or shape[2] != shape[3] or shape[2] not in ("bf16", "f16", "tf32"):
        raise Unsupported(f"unknown instruction: {instruction}")
    a, b, c = (
        Fragments(operand, machine, kind)
        for operand, kind in zip(instruction.operands[1:], (shape[2], shape[2], "f32"), strict=True)
    )
    writers = [machine.registers.writer(r, "f32") for r in vector(instruction.operands[0])]

    def apply(function, operand):
        return tuple(x if x is None else function(x) for x in operand.read())

    def run(mask, active):
        machine.whole_warps(active)
        tiles = apply(tile_a, a), apply(tile_b, b), apply(tile_c, c)
        values, undefined = product(*tiles, machine.options.cut)
        shadows = [None] * 4 if undefined is None else fragments_c(undefined)
        for write, value, shadow in zip(writers, fragments_c(values), shadows, strict=True):
            write(value, shadow, mask)

    return run


def _count(instruction):
    count = next((int(p[1:]) for p in instruction.parts if p in ("x1", "x2", "x4")), 0)
    if not count or "m8n8" not in instruction.parts or instruction.parts[-1] != "b16":
        raise Unsupported(f"unknown instruction: {instruction}")
    return count


class Rows:
    """The rows of ldmatrix and stmatrix: lanes 0 to 8 * count - 1 of a warp name one each."""

    def __init__(self, operand, count, machine, at):
        self.machine, self.count = machine, count
        self.lanes = machine.thread % 32 < 8 * count
        self.place = Place(operand, "shared", 16, machine, at)

    def naming(self, active):
        """Return which threads name a row; all lanes of their warps must be here."""
        self.machine.whole_warps(active)
        return self.lanes if active is None else active & self.lanes


def load_matrix(instruction, machine):
    """ldmatrix: every lane names a row of 16 bytes and gets its share of all of them."""
    count, transposed = _count(instruction), "trans" in instruction.parts
    writers = [machine.registers.writer(r, "b32") for r in vector(instruction.operands[0])]
    rows = Rows(instruction.operands[1], count, machine, instruction.index)

    def spread(words):
        x = words.view(np.uint16).reshape(machine.warps, 4, 8, 8)[:, :count]
        x = x.swapaxes(2, 3) if transposed else x
        x = np.ascontiguousarray(x).view(np.uint32).reshape(machine.warps, count, 32)
        return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(count, -1)

    def run(mask, active):
        words, undefined = rows.place.read(rows.naming(active))
        shadows = [None] * count if undefined is None else spread(undefined)
        for write, value, shadow in zip(writers, spread(words), shadows, strict=True):
            write(value, shadow, mask)

    return run


def store_matrix(instruction, machine):
    """stmatrix: the inverse of ldmatrix."""
    count, transposed = _count(instruction), "trans" in instruction.parts
    readers = [machine.registers.reader(r, "b32") for r in vector(instruction.operands[1])]
    rows = Rows(instruction.operands[0], count, machine, instruction.index)

    def gather(registers):
        x = np.zeros((4, machine.warps, 32), np.uint32)
        x[:count] = np.stack(registers, 0).reshape(count, machine.warps, 32)
        x = np.ascontiguousarray(x.swapaxes(0, 1)).view(np.uint16).reshape(-1, 4, 8, 8)
        x = x.swapaxes(2, 3) if transposed else x
        return np.ascontiguousarray(x).view(np.complex128).ravel()

    def run(mask, active):
        values, shadows = zip(*(read() for read in readers), strict=True)
        undefined = None
        if any(shadow is not None for shadow in shadows):
            nothing = np.zeros(machine.count, np.uint32)
            undefined = gather([nothing if shadow is None else shadow for shadow in shadows])
        rows.place.write(gather(values), undefined, rows.naming(active))

    return run


INSTRUCTIONS = {"ldmatrix": load_matrix, "stmatrix": store_matrix, "mma.sync": multiply}
