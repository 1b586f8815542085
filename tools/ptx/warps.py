"""Exchange between the lanes of a warp: shuffles, votes, reductions."""

import numpy as np

from .faults import Fault, Unsupported

LANES = np.arange(32)


def _named(machine, members, active):
    """Return which lanes take part [warps, 32]; all that the member mask names must be here."""
    here = np.ones((machine.warps, 32), bool) if active is None else active.reshape(-1, 32)
    value, undefined = members()
    machine.registers.decided(undefined, active, "the member mask")
    bits = value.reshape(-1, 32)[np.arange(machine.warps), here.argmax(1)]
    named = (bits[:, None] >> LANES.astype(np.uint32)) & 1 == 1
    running = here.any(1)
    alive = machine.live.reshape(-1, 32)
    if (named & ~here & alive)[running].any() or (here & ~named).any():
        raise Fault("divergence", "the lanes here are not those that the member mask names")
    return here


def shuffle(instruction, machine):
    """shfl.sync: lanes read a register of other lanes."""
    mode, operands, registers = instruction.parts[2], instruction.operands, machine.registers
    value_name, _, predicate_name = operands[0].partition("|")
    write = registers.writer(value_name.strip(), "u32")
    write_predicate = registers.writer(predicate_name.strip() or "_", "pred")
    read, distance, control, members = (registers.reader(x, "u32") for x in operands[1:])

    def run(mask, active):
        here = _named(machine, members, active)
        (value, undefined), (b, shadow_b), (c, shadow_c) = read(), distance(), control()
        for shadow in (shadow_b, shadow_c):
            registers.decided(shadow, active, "the lane")
        b, c = (x.astype(np.int64).reshape(-1, 32) for x in (b, c))
        clamp, segment = c & 31, (c >> 8) & 31
        highest = (LANES & segment) | (clamp & ~segment)
        lowest = LANES & segment
        source = {
            "up": lambda: LANES - (b & 31),
            "down": lambda: LANES + (b & 31),
            "bfly": lambda: LANES ^ (b & 31),
            "idx": lambda: lowest | (b & 31 & ~segment),
        }[mode]()
        inside = source >= highest if mode == "up" else source <= highest
        source = np.where(inside, source, LANES)
        taken = np.take_along_axis(value.reshape(-1, 32), source, 1).ravel()
        shadow = None
        if undefined is not None:
            shadow = np.take_along_axis(undefined.reshape(-1, 32), source, 1).ravel()
        if not here.all():
            missing = ~np.take_along_axis(here, source, 1).ravel()
            if (missing & here.ravel()).any():
                shadow = np.zeros(machine.count, np.uint32) if shadow is None else shadow
                shadow = np.where(missing, ~np.uint32(0), shadow)
        write(taken, shadow, mask)
        write_predicate(inside.ravel(), None, mask)

    return run


REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def reduce(instruction, machine):
    """redux.sync: one integer reduction over the lanes."""
    operation, kind = instruction.parts[2], instruction.parts[-1]
    if operation not in REDUCTIONS or kind not in ("u32", "s32", "b32"):
        raise Unsupported(str(instruction))
    registers, operands = machine.registers, instruction.operands
    read, members = registers.reader(operands[1], kind), registers.reader(operands[2], "u32")
    write, function = registers.writer(operands[0], kind), REDUCTIONS[operation]

    def run(mask, active):
        here = _named(machine, members, active)
        value, undefined = read()
        lanes = value.reshape(-1, 32)
        if here.all():
            result = function.reduce(lanes, axis=1, dtype=value.dtype)
        else:
            result = np.zeros(machine.warps, value.dtype)
            for warp in np.flatnonzero(here.any(1)):
                result[warp] = function.reduce(lanes[warp, here[warp]], dtype=value.dtype)
        if undefined is not None:
            undefined = ((undefined.reshape(-1, 32) != 0) & here).any(1).repeat(32)
        write(result.repeat(32), undefined, mask)

    return run


def vote(instruction, machine):
    """vote.sync: all, any, uni and ballot of a predicate over the lanes."""
    mode, operands, registers = instruction.parts[2], instruction.operands, machine.registers
    negated = operands[1].startswith("!")
    read = registers.reader(operands[1].lstrip("!"), "pred")
    members = registers.reader(operands[2], "u32")
    write = registers.writer(operands[0], "b32" if mode == "ballot" else "pred")

    def run(mask, active):
        here = _named(machine, members, active)
        value, undefined = read()
        votes = (~value if negated else value).reshape(-1, 32)
        if undefined is not None:
            undefined = (undefined.reshape(-1, 32) & here).any(1).repeat(32)
        if mode == "ballot":
            result = ((votes & here).astype(np.uint32) << LANES.astype(np.uint32)).sum(1)
            result = result.astype(np.uint32)
        else:
            every, some = (votes | ~here).all(1), (votes & here).any(1)
            result = {"all": every, "any": some, "uni": every | ~some}[mode]
        write(result.repeat(32), undefined, mask)

    return run


def match(instruction, machine):
    """match.any.sync: which lanes hold the same value."""
    if instruction.parts[1] != "any":
        raise Unsupported(str(instruction))
    registers, operands = machine.registers, instruction.operands
    read = registers.reader(operands[1], instruction.parts[-1])
    members, write = registers.reader(operands[2], "u32"), registers.writer(operands[0], "b32")

    def run(mask, active):
        here = _named(machine, members, active)
        value, undefined = read()
        rows = value.reshape(-1, 32)
        same = (rows[:, :, None] == rows[:, None, :]) & here[:, None, :]
        bits = (same.astype(np.uint32) << LANES.astype(np.uint32)).sum(2).astype(np.uint32)
        if undefined is not None:
            undefined = ((undefined.reshape(-1, 32) != 0) & here).any(1).repeat(32)
        write(bits.ravel(), undefined, mask)

    return run


def elect(instruction, machine):
    """elect.sync: the first lane of the member mask."""
    registers, operands = machine.registers, instruction.operands
    lane, _, predicate = operands[0].partition("|")
    members = registers.reader(operands[1], "u32")
    write_lane = registers.writer(lane.strip(), "b32")
    write = registers.writer(predicate.strip(), "pred")

    def run(mask, active):
        first = _named(machine, members, active).argmax(1).repeat(32)
        write_lane(first.astype(np.uint32), None, mask)
        write(first == machine.thread % 32, None, mask)

    return run


def active_mask(instruction, machine):
    """activemask: the lanes that are here."""
    write = machine.registers.writer(instruction.operands[0], "b32")

    def run(mask, active):
        here = np.ones((machine.warps, 32), bool) if active is None else active.reshape(-1, 32)
        bits = (here.astype(np.uint32) << LANES.astype(np.uint32)).sum(1).astype(np.uint32)
        write(bits.repeat(32), None, mask)

    return run


INSTRUCTIONS = {
    "shfl.sync": shuffle,
    "redux.sync": reduce,
    "vote.sync": vote,
    "match": match,
    "elect.sync": elect,
    "activemask": active_mask,
}
