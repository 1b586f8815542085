"""Loads, stores, atomics and cp.async."""

from dataclasses import dataclass

import numpy as np

from .faults import Unsupported
from .global_order import SCOPES, STRONG
from .memory import UNSIGNED, WORDS
from .operands import address, vector
from .parser import SIZES
from .registers import TYPES

GENERIC = {"shared": 1 << 24, "local": 1 << 28, "param": 1 << 32}  # what cvta adds; global: nothing


def state_space(parts):
    """Return the state space that qualifiers name, "generic" if none."""
    for part in parts[1:]:
        space = part.split("::")[0]
        if space in ("global", "shared", "local", "param", "const"):
            return space
    return "generic"


def shape_of(instruction):
    """Return (type, bytes of an element, number of elements) of a load or store."""
    kind = instruction.parts[-1]
    count = next((int(p[1:]) for p in instruction.parts if p in ("v2", "v4", "v8")), 1)
    if kind not in SIZES or SIZES[kind] * count > 16:
        raise Unsupported(f"unknown instruction: {instruction}")
    return kind, SIZES[kind], count


class Place:
    """An address operand in a state space: resolves it and keeps the books of every access."""

    def __init__(self, operand, space, size, machine, at, parts=()):
        self.machine, self.space, self.size, self.at = machine, space, size, at
        self.parts, self.strong = parts, bool(set(STRONG) & set(parts))
        self.address = address(operand, machine.registers)

    def resolve(self, active, *, write=False):
        """Return (memory, index in words) of this access, checked."""
        machine = self.machine
        place, undefined = self.address()
        machine.registers.decided(undefined, active, "the address")
        space = self.space
        if space == "generic":
            space, place = self._generic(place, active)
        memory, window = machine.memory_of(space)
        self.now = space, place
        if space == "global":
            machine.dependencies.check(place, self.size, active, write=write)
        return memory, memory.locate(place, self.size, active, window)

    def _generic(self, place, active):
        some = place if active is None else place[active]
        for space, base in sorted(GENERIC.items(), key=lambda item: -item[1]):
            if (some >= base).all() and (some < base * 16).all():
                return space, place - base
        return "global", place

    def count(self, active, *, write):
        """Count the access."""
        machine, (space, place) = self.machine, self.now
        if space == "global" and machine.options.count:
            machine.counts.global_access(place, self.size, active, write=write)
        elif space == "shared" and machine.options.count:
            machine.counts.shared_access(place, self.size, active)

    def read(self, active):
        """Resolve, count and check a read; return (words, undefined bits or None)."""
        memory, index = self.resolve(active)
        self.count(active, write=False)
        self.ordered_read(memory, index, active)
        return memory.load(index, self.size)

    def ordered_read(self, memory, index, active):
        """Check that a read is ordered after what it reads."""
        order, thread = self._order(memory), self.machine.thread
        if order is None:
            return
        some, thread = (index, thread) if active is None else (index[active], thread[active])
        granules = order.granules(some, self.size)
        if order is self.machine.order:
            order.read(granules, thread, self.at)
            return
        if self.strong:
            self._synchronise(index, thread, writes=False)
        order.read(granules, thread, self.at, strong=self.strong, constant="nc" in self.parts)

    def _order(self, memory):
        machine = self.machine
        if memory is machine.shared:
            return machine.order
        return machine.global_order if memory is machine.memory else None

    def _synchronise(self, index, threads, **directions):
        """Acquire or release at the address of each thread, unless that orders its block alone."""
        for thread in threads:
            address = int(index[thread]) * self.size
            self.machine.global_order.synchronise(address, thread, self.parts, **directions)

    def write(self, words, undefined, active):
        """Resolve, count and check a write, and do it."""
        memory, index = self.resolve(active, write=True)
        self.count(active, write=True)
        thread = self.machine.thread
        if active is not None:
            index, words, thread = index[active], words[active], thread[active]
            undefined = None if undefined is None else undefined[active]
        order, granules = self._order(memory), None
        if order is not None:
            granules = order.granules(index, self.size)
            same = memory.holds(index, self.size, words)
            if order is self.machine.order:
                order.write(granules, thread, self.at, same=same)
            else:
                order.write(granules, thread, self.at, same=same, strong=self.strong)
                if self.strong:
                    for i, one in zip(index, thread, strict=True):
                        order.synchronise(int(i) * self.size, one, self.parts, reads=False)
        memory.store(index, self.size, words, undefined)
        lost = ~memory.holds(index, self.size, words)
        if lost.any():
            self.machine.lost(lost, order, granules, thread, self.at)


def load(instruction, machine):
    """ld: a load; what was never written is undefined, not an error yet."""
    kind, size, count = shape_of(instruction)
    writers = [machine.registers.writer(r, kind) for r in vector(instruction.operands[0])]
    place = Place(
        instruction.operands[1],
        state_space(instruction.parts),
        size * count,
        machine,
        instruction.index,
        instruction.parts,
    )

    def columns(words):
        parts = words.view(UNSIGNED[size])
        return [parts] if count == 1 else np.ascontiguousarray(parts.reshape(-1, count).T)

    def run(mask, active):
        words, undefined = place.read(active)
        shadows = [None] * count if undefined is None else columns(undefined)
        for write, value, shadow in zip(writers, columns(words), shadows, strict=True):
            write(value, shadow, mask)

    return run


def store(instruction, machine):
    """st: a store; to global memory, only of values that are defined."""
    kind, size, count = shape_of(instruction)
    readers = [machine.registers.reader(r, kind) for r in vector(instruction.operands[1])]
    place = Place(
        instruction.operands[0],
        state_space(instruction.parts),
        size * count,
        machine,
        instruction.index,
        instruction.parts,
    )

    def joined(columns):
        if count == 1:
            return columns[0].view(UNSIGNED[size])
        columns = [column.view(UNSIGNED[size]) for column in columns]
        return np.stack(columns, 1).view(WORDS[size * count]).ravel()

    def run(mask, active):
        values, shadows = zip(*(read() for read in readers), strict=True)
        undefined = None
        if any(shadow is not None for shadow in shadows):
            nothing = np.zeros(machine.count, UNSIGNED[size])
            undefined = [nothing if shadow is None else shadow for shadow in shadows]
        if undefined is not None and place.resolve(active)[0] is machine.memory:
            for shadow in undefined:
                machine.registers.decided(shadow, active, "what is stored")
            undefined = None
        place.write(joined(values), undefined and joined(undefined), active)

    return run


ATOMIC = {
    "add": lambda old, b, c: old + b,
    "min": lambda old, b, c: min(old, b),
    "max": lambda old, b, c: max(old, b),
    "and": lambda old, b, c: old & b,
    "or": lambda old, b, c: old | b,
    "xor": lambda old, b, c: old ^ b,
    "exch": lambda old, b, c: b,
    "cas": lambda old, b, c: c if old == b else old,
    "inc": lambda old, b, c: old.dtype.type(0) if old >= b else old + old.dtype.type(1),
    "dec": lambda old, b, c: b if old == 0 or old > b else old - old.dtype.type(1),
}


def atomic(instruction, machine):
    """Atom and red: threads one after the other, in ascending order."""
    parts, operands = instruction.parts, list(instruction.operands)
    kind = parts[-1]
    operation = next((ATOMIC[p] for p in parts if p in ATOMIC), None)
    if operation is None or kind not in SIZES:
        raise Unsupported(f"unknown atomic: {instruction}")
    target = operands.pop(0) if parts[0] == "atom" else "_"
    write = machine.registers.writer(target, kind)
    size, dtype = SIZES[kind], TYPES[kind]
    place = Place(operands[0], state_space(parts), size, machine, instruction.index)
    readers = [machine.registers.reader(operand, kind) for operand in operands[1:]]

    def run(mask, active):
        sources = []
        for read in readers:
            value, undefined = read()
            machine.registers.decided(undefined, active, "an operand")
            sources.append(value)
        memory, index = place.resolve(active, write=True)
        order = machine.global_order if memory is machine.memory else None
        if place.now[0] == "global" and machine.options.count:
            for is_write in (False, True):
                machine.counts.global_access(place.now[1], size, active, write=is_write)
        data, defined = memory.data.view(dtype), memory.defined.view(UNSIGNED[size])
        old = np.zeros(machine.count, dtype)
        for thread in range(machine.count) if active is None else np.flatnonzero(active):
            at = index[thread]
            if order is not None:
                granules = order.granules(np.array([at]), size)
                order.synchronise(int(at) * size, thread, parts)
                order.write(granules, np.array([thread]), instruction.index, strong=True)
            machine.registers.decided(~defined[at : at + 1], None, "what an atomic changes")
            old[thread] = data[at]
            b, c = sources[0][thread], sources[-1][thread]
            data[at] = operation(data[at], b, c)
        write(old, None, mask)

    return run


@dataclass
class Copy:
    """One executed cp.async: where it writes, what, and the threads that have not waited for it."""

    index: np.ndarray
    size: int
    words: np.ndarray
    undefined: np.ndarray | None
    threads: np.ndarray

    def part(self, threads):
        """Return the same copy for some of its threads."""
        return Copy(self.index, self.size, self.words, self.undefined, self.threads & threads)


class Pending:
    """Asynchronous copies under way, in groups per thread as they commit and wait for them."""

    def __init__(self, machine):
        self.machine = machine
        self.open, self.groups = [], []  # copies; (number per thread, threads, copies)
        self.committed = np.zeros(machine.count, int)

    def issue(self, copy, at):
        """Start a copy."""
        order, thread = self.machine.order, np.flatnonzero(copy.threads)
        order.write(order.granules(copy.index[thread], copy.size), thread, at, pending=True)
        if self.machine.options.copies == "issue":
            self._store(copy)
        self.open.append(copy)

    def _store(self, copy):
        threads = copy.threads
        shadow = None if copy.undefined is None else copy.undefined[threads]
        self.machine.shared.store(copy.index[threads], copy.size, copy.words[threads], shadow)

    def commit(self, threads):
        """Close the group of threads."""
        copies = [copy.part(threads) for copy in self.open]
        self.groups.append((self.committed.copy(), threads, copies))
        self.committed = self.committed + threads
        self.open = [c for c in (copy.part(~threads) for copy in self.open) if c.threads.any()]

    def wait(self, threads, allowed):
        """Land all groups of threads but the ``allowed`` last ones."""
        left = []
        for number, waiting, copies in self.groups:
            done = threads & waiting & (self.committed - number > allowed)
            if done.any():
                for copy in copies:
                    self._land(copy.part(done))
            if (waiting & ~done).any():
                left.append((number, waiting & ~done, copies))
        self.groups = left

    def _land(self, copy):
        thread = np.flatnonzero(copy.threads)
        if self.machine.options.copies == "wait":
            self._store(copy)
        order = self.machine.order
        order.land(order.granules(copy.index[thread], copy.size), thread)


def copy_async(instruction, machine):
    """cp.async.ca and .cg: 4, 8 or 16 bytes, of which those beyond the source size are zero."""
    operands, at = instruction.operands, instruction.index
    size = int(operands[2], 0)
    target = Place(operands[0], "shared", size, machine, at)
    source = Place(operands[1], "global", size, machine, at)
    length = machine.registers.reader(operands[3] if len(operands) > 3 else str(size), "u32")

    def run(mask, active):
        have, undefined = length()
        machine.registers.decided(undefined, active, "the source size")
        reads = have > 0 if active is None else active & (have > 0)
        if ((have != 0) & (have != size) & reads).any():
            raise Unsupported(f"cp.async of part of its {size} bytes")
        _, index = target.resolve(active)
        reads = None if reads.all() else reads
        memory, place = source.resolve(reads)
        source.ordered_read(memory, place, reads)
        if machine.options.count:
            machine.counts.global_access(source.now[1], size, reads)
            machine.counts.shared_access(target.now[1], size, active)
        words, shadow = memory.load(place, size)
        if reads is not None:
            words = np.where(reads, words, 0)
            shadow = None if shadow is None else np.where(reads, shadow, 0)
        threads = np.ones(machine.count, bool) if active is None else active
        machine.copies.issue(Copy(index, size, words, shadow, threads), at)

    return run


def copy_commit(instruction, machine):
    """cp.async.commit_group."""
    return lambda mask, active: machine.copies.commit(machine.running(active))


def copy_wait(instruction, machine):
    """cp.async.wait_group N and wait_all."""
    everything = "wait_all" in instruction.parts
    allowed = 0 if everything else int(instruction.operands[0], 0)

    def run(mask, active):
        threads = machine.running(active)
        if everything:
            machine.copies.commit(threads)
        machine.copies.wait(threads, allowed)

    return run


def fence(instruction, machine):
    """Fence and membar: of the GPU's scope they let relaxed accesses order blocks."""
    if not set(SCOPES) & set(instruction.parts) or not machine.global_order:
        return nothing(instruction, machine)

    def run(mask, active):
        threads = machine.running(active)
        machine.global_order.fence(np.flatnonzero(threads.reshape(-1, 32).any(1)))

    return run


def nothing(instruction, machine):
    """Decode an instruction without effect here, such as a hint to caches."""
    return lambda mask, active: None


INSTRUCTIONS = {
    "ld": load,
    "ldu": load,
    "st": store,
    "fence": fence,
    "membar": fence,
    "atom": atomic,
    "red": atomic,
    "cp.async.ca": copy_async,
    "cp.async.cg": copy_async,
    "cp.async.commit_group": copy_commit,
    "cp.async.wait_group": copy_wait,
    "cp.async.wait_all": copy_wait,
    "prefetch": nothing,
    "prefetchu": nothing,
    "discard": nothing,
    "applypriority": nothing,
    "nop": nothing,  # what a mutation leaves where it removes an instruction
}
