"""Bulk copies of the asynchronous proxy (TMA), between global and shared memory.

A copy to shared memory lands at issue, or when nothing else can run any more (`Options.copies`),
and then counts its bytes at its mbarrier. A copy to global memory reads its source at issue or at
the wait for its group. What CUDA keeps in the 128 opaque bytes of a tensor map is a `TensorMap` of
the launch here; the bytes hold its number.
"""

import re
import struct
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from .barriers import MBarrierOperand
from .faults import Fault, Unsupported
from .transfers import Place

TENSOR = re.compile(r"\[\s*([%\w$.~]+)\s*,\s*\{([^}]*)\}\s*\]$")


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves; dimensions innermost first.

    ``strides`` are those of the outer dimensions, in bytes. ``swizzle`` is 0, 32, 64 or 128 bytes.
    Elements outside of the tensor are read as zeros and not written.
    """

    address: int
    element_size: int
    sizes: tuple
    strides: tuple
    box: tuple
    swizzle: int = 0

    def __post_init__(self):
        """Refuse what cuTensorMapEncodeTiled refuses (CUDA driver API, tensor map objects)."""
        inner = self.box[0] * self.element_size
        wrong = [
            (self.address % 16, f"an address of {self.address:#x}, no multiple of 16"),
            (any(x % 16 or not 0 < x < 1 << 40 for x in self.strides), f"strides {self.strides}"),
            (not all(0 < x <= 256 for x in self.box), f"a box of {self.box}"),
            (not all(0 < x <= 1 << 32 for x in self.sizes), f"sizes {self.sizes}"),
            (inner % 16, f"rows of {inner} bytes in a box"),
            (
                self.swizzle and inner > self.swizzle,
                f"rows of {inner} bytes, {self.swizzle} swizzled",
            ),
        ]
        for is_wrong, what in wrong:
            if is_wrong:
                raise Fault("alignment", f"a tensor map with {what}")

    @staticmethod
    def parameter(number):
        """Return the bytes to pass for the launch's tensor map of this number."""
        return struct.pack("<Q", number).ljust(128, b"\0")

    def place(self, corner):
        """Return (global addresses, which exist) of the box's elements, flat, innermost fastest."""
        place, exists = np.int64(self.address), np.True_
        for axis, (start, stride) in enumerate(
            zip(corner, (self.element_size, *self.strides), strict=True)
        ):
            at = start + np.arange(self.box[axis])
            shape = (-1,) + (1,) * axis
            place = place + (at * stride).reshape(shape)
            exists = exists & ((at >= 0) & (at < self.sizes[axis])).reshape(shape)
        return place.ravel(), np.broadcast_to(exists, place.shape).ravel()

    def shared(self, start):
        """Return the shared addresses of the box's elements in the same order."""
        count = int(np.prod(self.box))
        flat = start + np.arange(count) * self.element_size
        return flat ^ (flat >> 3 & (self.swizzle - 16)) if self.swizzle else flat


@dataclass
class Transfer:
    """One bulk copy: elements of ``size`` bytes between shared and global addresses."""

    thread: int
    size: int
    shared: np.ndarray
    place: np.ndarray
    exists: np.ndarray
    granules: np.ndarray
    at: int
    barrier: tuple | None = None


class Copies:
    """Bulk copies under way."""

    def __init__(self, machine):
        self.machine, self.pending = machine, []
        self.open, self.groups = defaultdict(list), defaultdict(list)  # to global, by thread

    def start(self, thread, size, shared, place, exists, at, barrier=None):
        """Issue a copy: to shared memory if it has an mbarrier, else to global memory."""
        machine = self.machine
        index = machine.shared.locate(shared, size, None, machine.block[thread])
        granules = np.unique(index * size // machine.order.granule)
        transfer = Transfer(thread, size, index, place, exists, granules, at, barrier)
        machine.dependencies.check_copy(thread, place[exists], size, write=barrier is None)
        if machine.options.count:
            machine.counts.bulk_access(place[exists], size, write=barrier is None)
        if barrier is not None:
            machine.order.bulk_write(granules, thread, at)
            self.pending.append(transfer)
            if machine.options.copies == "issue":
                self.land_one()
            return
        machine.order.hold(granules, [thread // 32], at)
        self.open[thread].append(transfer)
        if machine.options.copies == "issue":
            self._to_global(transfer)

    def land_one(self):
        """Land the oldest copy to shared memory; False if there is none."""
        if not self.pending:
            return False
        machine, copy = self.machine, self.pending.pop(0)
        exists = None if copy.exists.all() else copy.exists
        index = machine.memory.locate(copy.place, copy.size, exists)
        _ordered(machine, index if exists is None else index[exists], copy, "read")
        words, undefined = machine.memory.load(index, copy.size)
        if exists is not None:
            words = np.where(exists, words, words.dtype.type(0))
            undefined = None if undefined is None else np.where(exists, undefined, 0)
        machine.shared.store(copy.shared, copy.size, words, undefined)
        state = machine.mbarriers.state(copy.barrier)
        machine.order.bulk_land(copy.granules, state.published)
        state.bytes -= copy.size * len(copy.shared)
        machine.mbarriers.turn(state)
        return True

    def commit(self, thread):
        """Close a thread's group of copies to global memory."""
        self.groups[thread].append(self.open.pop(thread, []))

    def wait(self, thread, allowed):
        """Finish a thread's groups but the last ``allowed``."""
        groups, machine = self.groups[thread], self.machine
        while len(groups) > allowed:
            for copy in groups.pop(0):
                if machine.options.copies == "wait":
                    self._to_global(copy)
                held = [other.granules for group in groups for other in group]
                machine.order.let_go(copy.granules, [thread // 32], held)

    def _to_global(self, copy):
        machine = self.machine
        words, undefined = machine.shared.load(copy.shared[copy.exists], copy.size)
        if undefined is not None:
            raise Fault("undefined", "a bulk copy stores bytes that were never written")
        index = machine.memory.locate(copy.place[copy.exists], copy.size, None)
        _ordered(machine, index, copy, "write")
        machine.memory.store(index, copy.size, words, None)


def _ordered(machine, index, copy, access):
    """Check a copy's side in global memory, which is as the issuing thread's."""
    order = machine.global_order
    if order and len(index):
        thread = np.full(len(index), copy.thread)
        getattr(order, access)(order.granules(index, copy.size), thread, copy.at)


def tensor_copy(instruction, machine):
    """cp.async.bulk.tensor, tiled, in one direction or the other."""
    if "im2col" in instruction.name or "multicast" in instruction.name:
        raise Unsupported(f"unknown instruction: {instruction}")
    to_shared = any(part.startswith("mbarrier::") for part in instruction.parts)
    shared, tensor = instruction.operands[:2] if to_shared else instruction.operands[1::-1]
    match, registers = TENSOR.match(tensor), machine.registers
    if not match:
        raise Unsupported(f"tensor operand {tensor!r}")
    target = Place(shared, "shared", 16, machine, instruction.index)
    number = Place(f"[{match[1]}]", "generic", 8, machine, instruction.index)
    corner = [registers.reader(name.strip(), "s32") for name in match[2].split(",")]
    barrier = None
    if to_shared:
        barrier = MBarrierOperand(instruction.operands[2], machine, instruction.index)

    def run(mask, active):
        threads = machine.running(active)
        memory, index = number.resolve(threads)
        numbers = memory.load(index, 8)[0]
        target.resolve(threads)
        starts = target.now[1]
        corners = []
        for read in corner:
            value, undefined = read()
            registers.decided(undefined, active, "a coordinate")
            corners.append(value)
        keys = barrier.keys(threads) if barrier else [None] * int(threads.sum())
        for thread, key in zip(np.flatnonzero(threads), keys, strict=True):
            tensor_map = machine.launch.tensor_maps[int(numbers[thread])]
            if starts[thread] % 128:
                raise Fault(
                    "alignment", f"a tensor copy at shared byte {starts[thread]}, not at 128"
                )
            place, exists = tensor_map.place([int(value[thread]) for value in corners])
            elements = tensor_map.shared(int(starts[thread]))
            machine.bulk.start(
                thread, tensor_map.element_size, elements, place, exists, instruction.index, key
            )

    return run


def plain_copy(instruction, machine):
    """cp.async.bulk of contiguous bytes, a multiple of 16, in one direction or the other."""
    to_shared = any(part.startswith("mbarrier::") for part in instruction.parts)
    if "reduce" in instruction.parts:
        raise Unsupported(f"unknown instruction: {instruction}")
    names = (
        instruction.operands
        if to_shared
        else (*instruction.operands[1::-1], *instruction.operands[2:])
    )
    target = Place(names[0], "shared", 16, machine, instruction.index)
    source = Place(names[1], "global", 16, machine, instruction.index)
    length = machine.registers.reader(names[2], "u32")
    barrier = MBarrierOperand(names[3], machine, instruction.index) if to_shared else None

    def run(mask, active):
        threads = machine.running(active)
        target.resolve(threads)
        source.resolve(threads)
        size, undefined = length()
        machine.registers.decided(undefined, active, "the size")
        keys = barrier.keys(threads) if barrier else [None] * int(threads.sum())
        for thread, key in zip(np.flatnonzero(threads), keys, strict=True):
            if size[thread] % 16:
                raise Fault("alignment", f"a bulk copy of {size[thread]} bytes")
            steps = np.arange(0, size[thread], 16)
            exists = np.ones(len(steps), bool)
            machine.bulk.start(
                thread, 16, target.now[1][thread] + steps, source.now[1][thread] + steps,
                exists, instruction.index, key,
            )  # fmt: skip

    return run


def commit(instruction, machine):
    """cp.async.bulk.commit_group."""

    def run(mask, active):
        for thread in np.flatnonzero(machine.running(active)):
            machine.bulk.commit(thread)

    return run


def wait(instruction, machine):
    """cp.async.bulk.wait_group, with .read too: sources may be written again."""
    allowed = int(instruction.operands[0], 0)

    def run(mask, active):
        for thread in np.flatnonzero(machine.running(active)):
            machine.bulk.wait(thread, allowed)

    return run


INSTRUCTIONS = {
    "cp.async.bulk.tensor": tensor_copy,
    "cp.async.bulk": plain_copy,
    "cp.async.bulk.commit_group": commit,
    "cp.async.bulk.wait_group": wait,
}
