"""cvt between all types, and cvta between generic addresses and those of a state space."""

import numpy as np

from .bits import moving
from .faults import Unsupported, expect_qualifiers
from .floats import SHORT, TO_F16, flush, to_bf16, to_f16
from .registers import TYPES, whole
from .transfers import GENERIC

FLOATS = ("f16", "bf16", "f32", "f64")
ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _convert(instruction, machine):
    """cvt: integers move their bits, everything with a float in it computes."""
    parts, operands, registers = instruction.parts, instruction.operands, machine.registers
    target, source = parts[-2], parts[-1]
    if target in ("bf16x2", "f16x2") and source == "f32":
        return _to_pair(instruction, machine)
    if source in ("e4m3x2", "e5m2x2"):
        return _from_pair(instruction, machine)
    if target not in FLOATS and source not in FLOATS and target != "tf32":
        kind = (1, [source], [], target, lambda a: a.astype(TYPES[target]))
        if "sat" in parts:
            raise Unsupported(str(instruction))
        return moving(lambda _: kind)(instruction, machine)
    read, write = registers.reader(operands[1], source), registers.writer(operands[0], target)
    expect_qualifiers(instruction, ("rn", "rna", *ROUNDINGS, "ftz", target))
    load, round_ = _as_number(source), _as_bits(target, parts)
    ftz = "ftz" in parts

    def run(mask, active):
        value, undefined = read()
        value = load(value)
        value = round_(flush(value) if ftz and value.dtype == np.float32 else value)
        write(value, whole(undefined), mask)

    return run


def _as_number(kind):
    return SHORT[kind][0] if kind in SHORT else lambda x: x


def _as_bits(kind, parts):
    if kind == "tf32":
        return _round_tf32
    if kind in SHORT:
        return lambda x: SHORT[kind][1](x.astype(np.float32))
    whole_number = next((ROUNDINGS[p] for p in parts if p in ROUNDINGS), None)
    if kind in FLOATS:
        dtype = TYPES[kind]
        return lambda x: (whole_number(x) if whole_number else x).astype(dtype)
    if whole_number is None:
        raise Unsupported(f"unknown instruction: {'.'.join(parts)}")
    info = np.iinfo(TYPES[kind])

    def clamp(x):
        x = np.nan_to_num(
            whole_number(x).astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf
        )
        low, high = x <= info.min, x >= info.max
        inside = np.where(low | high, 0, x).astype(info.dtype)
        return np.where(low, info.min, np.where(high, info.max, inside)).astype(info.dtype)

    return clamp


def _round_tf32(x):
    """Round to 10 bits of mantissa, ties away from zero (``.rna``)."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits)


def _to_pair(instruction, machine):
    """cvt.rn.bf16x2.f32 d, a, b: ``a`` becomes the upper half."""
    target, operands = instruction.parts[-2], instruction.operands
    if any(p not in ("cvt", "rn", target, "f32") for p in instruction.parts):
        raise Unsupported(str(instruction))
    round_ = to_bf16 if target == "bf16x2" else to_f16
    readers = [machine.registers.reader(operand, "f32") for operand in operands[1:]]
    write = machine.registers.writer(operands[0], "u32")

    def run(mask, active):
        (high, shadow_high), (low, shadow_low) = (read() for read in readers)
        undefined = None
        if shadow_high is not None or shadow_low is not None:
            halves = [
                np.zeros(machine.count, np.uint32) if s is None else np.where(s != 0, 0xFFFF, 0)
                for s in (shadow_high, shadow_low)
            ]
            undefined = (halves[0].astype(np.uint32) << 16) | halves[1].astype(np.uint32)
        write((round_(high).astype(np.uint32) << 16) | round_(low), undefined, mask)

    return run


def _from_pair(instruction, machine):
    """cvt.rn.f16x2.e4m3x2 d, a: two bytes become two float16, exactly."""
    target, source = instruction.parts[-2:]
    expect_qualifiers(instruction, ("rn", target))
    if target != "f16x2":
        raise Unsupported(str(instruction))
    read = machine.registers.reader(instruction.operands[1], "u16")
    write = machine.registers.writer(instruction.operands[0], "u32")
    halves = TO_F16[source.removesuffix("x2")].astype(np.uint32)

    def run(mask, active):
        value, shadow = read()
        undefined = None
        if shadow is not None:
            low, high = (((shadow >> by) & 0xFF != 0) * np.uint32(0xFFFF) for by in (0, 8))
            undefined = low | (high << np.uint32(16))
        write(halves[value & 0xFF] | (halves[value >> 8] << np.uint32(16)), undefined, mask)

    return run


def _convert_address(instruction, machine):
    """Cvta and cvta.to: generic addresses are those of a space plus where it begins."""
    parts = instruction.parts
    space = next(p.split("::")[0] for p in parts[1:] if p != "to")
    offset = np.uint64(GENERIC.get(space, 0))
    read = machine.registers.reader(instruction.operands[1], parts[-1])
    write = machine.registers.writer(instruction.operands[0], parts[-1])

    def run(mask, active):
        value, undefined = read()
        value = value - offset if "to" in parts else value + offset
        write(value.astype(TYPES[parts[-1]]), undefined, mask)

    return run


INSTRUCTIONS = {"cvt": _convert, "cvta": _convert_address}
