"""Instructions that move or combine bits, and do with undefined bits just the same."""

import numpy as np

from .faults import Unsupported, expect_qualifiers
from .floats import SHORT
from .operands import vector
from .parser import SIZES
from .registers import TYPES, whole


def _nothing(like):
    return np.zeros(like.shape, like.dtype if like.dtype == bool else f"u{like.itemsize}")


def moving(function):
    """Make an instruction whose first operands move as ``function`` says, controlled by the rest.

    ``function`` gets the instruction's parts and returns (how many operands move, their types, the
    types of the others, the result's type, the function of all operands).
    """

    def build(instruction, machine):
        data, kinds, controls, result, apply = function(instruction.parts)
        if instruction.parts[0] != "cvt":
            expect_qualifiers(instruction, ("l", "r", "wrap", "clamp"))
        registers = machine.registers
        readers = [
            registers.reader(operand, kind)
            for operand, kind in zip(instruction.operands[1:], kinds + controls, strict=True)
        ]
        write = registers.writer(instruction.operands[0], result)

        def run(mask, active):
            values, shadows = zip(*(read() for read in readers), strict=True)
            undefined = None
            if any(shadow is not None for shadow in shadows[:data]):
                moved = [
                    _nothing(value) if shadow is None else shadow
                    for value, shadow in zip(values[:data], shadows[:data], strict=True)
                ]
                moved = [x.view(v.dtype) for x, v in zip(moved, values[:data], strict=True)]
                undefined = apply(*moved, *values[data:])
                undefined = undefined.view(_nothing(undefined).dtype)
            if (control := whole(*shadows[data:])) is not None:
                full = ~np.zeros((), TYPES[result].str.replace("i", "u").replace("f", "u"))
                undefined = np.where(control, full, 0 if undefined is None else undefined)
                undefined = undefined.astype(full.dtype)
            write(apply(*values), undefined, mask)

        return run

    return build


def _shl(parts):
    kind = "u" + parts[-1][1:]
    bits = 8 * SIZES[kind]

    def apply(a, n):
        return np.where(n >= bits, 0, a << np.minimum(n, bits - 1).astype(a.dtype)).astype(a.dtype)

    return 1, [kind], ["u32"], kind, apply


def _shr(parts):
    kind = parts[-1].replace("b", "u")
    bits = 8 * SIZES[kind]

    def apply(a, n):
        shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
        return shifted if kind[0] == "s" else np.where(n >= bits, 0, shifted).astype(a.dtype)

    return 1, [kind], ["u32"], kind, apply


def _shf(parts):
    def apply(low, high, n):
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        n = (n & 31 if "wrap" in parts else np.minimum(n, 32)).astype(np.uint64)
        shifted = both >> n if "r" in parts else (both << n) >> np.uint64(32)
        return shifted.astype(np.uint32)

    return 2, ["u32", "u32"], ["u32"], "u32", apply


def _bfe(parts):
    kind = parts[-1]
    bits = 8 * SIZES[kind]

    def apply(a, start, length):
        start, length = start & 0xFF, length & 0xFF
        at = np.minimum(start, bits - 1)
        kept = np.clip(length, 1, bits - at)
        # To the top of the word and back: the second shift extends the sign where there is one.
        field = a << (bits - at - kept).astype(a.dtype) >> (bits - kept).astype(a.dtype)
        nothing = (length == 0) | ((start >= bits) & (kind[0] == "u"))
        return np.where(nothing, 0, field).astype(a.dtype)

    return 1, [kind], ["u32", "u32"], kind, apply


def _bfi(parts):
    kind = "u" + parts[-1][1:]

    def apply(a, b, start, length):
        one = np.uint64(1)
        start, length = start.astype(np.uint64) & 0xFF, length.astype(np.uint64) & 0xFF
        mask = (((one << length) - one) << start).astype(a.dtype)
        return (b & ~mask) | ((a << start.astype(a.dtype)) & mask)

    return 2, [kind, kind], ["u32", "u32"], kind, apply


def _prmt(parts):
    if parts[-1] != "b32" or len(parts) > 2:
        raise Unsupported(".".join(parts))

    def apply(a, b, selector):
        source = np.concatenate([a[:, None].view(np.uint8), b[:, None].view(np.uint8)], 1)
        out = np.empty((len(a), 4), np.uint8)
        for i in range(4):
            nibble = (selector >> np.uint32(4 * i)) & 15
            byte = np.take_along_axis(source, (nibble & 7).astype(np.int64)[:, None], 1)[:, 0]
            sign = (byte.view(np.int8) >> 7).view(np.uint8)
            out[:, i] = np.where(nibble & 8, sign, byte)
        return out.view(np.uint32).ravel()

    return 2, ["u32", "u32"], ["u32"], "u32", apply


def _selp(parts):
    kind = parts[-1]
    return 2, [kind, kind], ["pred"], kind, lambda a, b, p: np.where(p, a, b)


def _brev(parts):
    kind = "u" + parts[-1][1:]

    def apply(a):
        bits = np.unpackbits(a.view(np.uint8).reshape(len(a), -1), axis=1, bitorder="little")
        return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(a.dtype).ravel()

    return 1, [kind], [], kind, apply


def _logic(operation):
    """and, or, xor, not: a bit is defined if the defined operands alone decide it."""

    def build(instruction, machine):
        expect_qualifiers(instruction, ())
        kind, registers = instruction.parts[-1], machine.registers
        readers = [registers.reader(operand, kind) for operand in instruction.operands[1:]]
        write = registers.writer(instruction.operands[0], kind)

        def run(mask, active):
            values, shadows = zip(*(read() for read in readers), strict=True)
            undefined = None
            if any(shadow is not None for shadow in shadows):
                shadows = [
                    _nothing(v) if s is None else s for v, s in zip(values, shadows, strict=True)
                ]
                undefined = shadows[0]
                if len(values) == 2:
                    undefined = shadows[0] | shadows[1]
                    if operation is not np.bitwise_xor:
                        for value, shadow in zip(values, shadows, strict=True):
                            open_ = value if operation is np.bitwise_and else ~value
                            undefined = undefined & (open_ | shadow)
            write(operation(*values), undefined, mask)

        return run

    return build


def _lop3(instruction, machine):
    table = int(instruction.operands[4], 0)

    def apply(a, b, c):
        out = np.zeros_like(a)
        for i in range(8):
            if table >> i & 1:
                out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return out

    readers = [machine.registers.reader(x, "b32") for x in instruction.operands[1:4]]
    write = machine.registers.writer(instruction.operands[0], "b32")

    def run(mask, active):
        values, shadows = zip(*(read() for read in readers), strict=True)
        undefined = None
        for shadow in shadows:
            if shadow is not None:
                undefined = shadow if undefined is None else undefined | shadow
        write(apply(*values), undefined, mask)

    return run


def _mov(instruction, machine):
    """mov, also between one wide register and a vector of narrow ones."""
    expect_qualifiers(instruction, ())
    kind, (target, source) = instruction.parts[-1], instruction.operands
    registers = machine.registers
    if target.startswith("{") or source.startswith("{"):
        return _repack(kind, target, source, registers)
    read, write = registers.reader(source, kind), registers.writer(target, kind)
    return lambda mask, active: write(*read(), mask)


def _repack(kind, target, source, registers):
    many = vector(target if target.startswith("{") else source)
    part = f"u{8 * SIZES[kind] // len(many)}"
    whole_kind = "u" + kind[1:]
    if target.startswith("{"):
        read = registers.reader(source, whole_kind)
        writers = [registers.writer(name, part) for name in many]

        def unpack(mask, active):
            value, undefined = read()
            columns = value.view(TYPES[part]).reshape(-1, len(many))
            shadow = (
                None if undefined is None else undefined.view(TYPES[part]).reshape(columns.shape)
            )
            for i, write in enumerate(writers):
                write(columns[:, i].copy(), None if shadow is None else shadow[:, i].copy(), mask)

        return unpack
    readers = [registers.reader(name, part) for name in many]
    write = registers.writer(target, whole_kind)

    def join(columns):
        return np.stack(columns, 1).view(TYPES[whole_kind]).ravel()

    def pack(mask, active):
        values, shadows = zip(*(read() for read in readers), strict=True)
        undefined = None
        if any(shadow is not None for shadow in shadows):
            undefined = join(
                [_nothing(v) if s is None else s for v, s in zip(values, shadows, strict=True)]
            )
        write(join(values), undefined, mask)

    return pack


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compare(name, is_float):
    def apply(a, b):
        if not is_float:
            return COMPARISONS[name](a, b)
        unordered = np.isnan(a) | np.isnan(b)
        if name in ("nan", "num"):
            return unordered if name == "nan" else ~unordered
        if name in UNORDERED:
            return COMPARISONS[UNORDERED[name]](a, b) | unordered
        return COMPARISONS[name](a, b) & ~unordered

    return apply


def _setp(instruction, machine):
    """setp: one predicate or its complement too, combined with another predicate if wanted."""
    parts, registers = instruction.parts, machine.registers
    expect_qualifiers(instruction, ("ftz", *COMPARISONS, *UNORDERED, *BOOLEAN, "nan", "num"))
    kind, (target, a, b, *rest) = parts[-1], instruction.operands
    if kind in ("f16x2", "bf16x2"):
        raise Unsupported(str(instruction))
    meaning = SHORT[kind][0] if kind in SHORT else None
    combine = next((BOOLEAN[p] for p in parts[2:-1] if p in BOOLEAN), None)
    apply = _compare(parts[1], kind[0] == "f" or kind in SHORT)
    readers = [registers.reader(x, "u16" if meaning else kind) for x in (a, b)]
    negated = bool(rest) and rest[0].startswith("!")
    other = registers.reader(rest[0].lstrip("!"), "pred") if rest else None
    names = [name.strip() for name in target.split("|")]
    writers = [registers.writer(name, "pred") for name in names]

    def run(mask, active):
        (x, shadow_x), (y, shadow_y) = (read() for read in readers)
        x, y = (meaning(x), meaning(y)) if meaning else (x, y)
        value, undefined = apply(x, y), whole(shadow_x, shadow_y)
        results = [value, ~value]
        if other:
            predicate, shadow = other()
            predicate = ~predicate if negated else predicate
            results = [combine(result, predicate) for result in results]
            undefined = whole(undefined, shadow)
        for write, result in zip(writers, results, strict=False):
            write(result, undefined, mask)

    return run


def _counted(function):
    def build(instruction, machine):
        kind = "u" + instruction.parts[-1][1:]
        read = machine.registers.reader(instruction.operands[1], kind)
        write = machine.registers.writer(instruction.operands[0], "u32")

        def run(mask, active):
            value, undefined = read()
            bits = value[:, None].view(np.uint8)
            bits = np.unpackbits(bits, axis=1, bitorder="little")
            write(function(bits).astype(np.uint32), whole(undefined), mask)

        return run

    return build


def _leading_zeros(bits):
    return np.where(bits.any(1), bits[:, ::-1].argmax(1), bits.shape[1])


INSTRUCTIONS = {
    "mov": _mov,
    "selp": moving(_selp),
    "shl": moving(_shl),
    "shr": moving(_shr),
    "shf": moving(_shf),
    "bfe": moving(_bfe),
    "bfi": moving(_bfi),
    "prmt": moving(_prmt),
    "brev": moving(_brev),
    "and": _logic(np.bitwise_and),
    "or": _logic(np.bitwise_or),
    "xor": _logic(np.bitwise_xor),
    "not": _logic(np.bitwise_not),
    "lop3": _lop3,
    "setp": _setp,
    "popc": _counted(lambda bits: bits.sum(1)),
    "clz": _counted(_leading_zeros),
}
