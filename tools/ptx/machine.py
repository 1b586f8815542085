"""Runs a kernel: many blocks side by side, one array element per thread.

A wave is some blocks of the grid whose threads run together. A group is the threads that stand at
one instruction; the group with the lowest program counter runs first, so threads that parted at a
branch meet again at the first instruction that both reach. With ``Options.warps`` set, warps run
one after the other in a random order instead of together, each until it has to wait. Where the
paths of a warp meet at a barrier further up, at the end of a loop, the first ones wait there.
"""

import itertools
import random
from dataclasses import dataclass, field

import numpy as np

from . import (
    arithmetic,
    barriers,
    bits,
    bulk,
    convert,
    dependencies,
    matrices,
    transfers,
    warpgroup,
    warps,
)
from .counts import Counts, instruction_class
from .faults import Fault, Unsupported
from .global_order import STRONG, GlobalOrder
from .memory import Memory
from .order import Order
from .parser import SIZES
from .registers import Registers

TABLE = {}
for module in (
    *(arithmetic, barriers, bits, bulk, convert, dependencies, matrices, transfers, warpgroup),
    warps,
):
    TABLE |= module.INSTRUCTIONS

NOWHERE = 1 << 62
MAX_STEPS = 3_000_000
MOST_SHARED = 227 << 10  # bytes of a block on sm_90, the most of all


@dataclass(frozen=True)
class Options:
    """How to run: everything that a correct kernel's results must not depend on.

    copies
        When asynchronous copies and products take effect: at "issue" or at their "wait".
    warps
        None to run all warps together, or a seed for an order in which they run one by one.
    blocks
        None for ascending order, or a seed for a random one.
    wave
        How many blocks run side by side.
    count
        Whether to count sectors and bank conflicts, which takes time.
    sample
        Whether to execute few blocks only, the first, the second and the last along each axis, and
        to count the second for all in between. Then results are not whole.
    cut
        Whether products of matrices cut their sums off every 8 products, as tensor cores may,
        instead of rounding once; this one shows in the last bits.
    given
        Whether a NaN of an input is given as such, and not what nobody has written.
    """

    copies: str = "wait"
    warps: int | None = None
    blocks: int | None = None
    wave: int = 32
    count: bool = True
    sample: bool = False
    cut: bool = False
    given: bool = False

    @property
    def all_defined(self):
        """Whether inputs hold nothing but what they are given."""
        return self.sample or self.given


@dataclass(eq=False)
class Group:
    """Threads at one instruction: a mask over the wave."""

    pc: int
    mask: np.ndarray
    rank: int = 0
    waits: bool = False  # at a barrier, for lanes of its warps that are on another path


@dataclass
class Launch:
    """A kernel with its launch parameters: ``parameters`` holds the bytes of each argument.

    ``tensor_maps`` are what bulk tensor copies look up, by number. ``counters`` are the keys of
    allocations that must end as they began, because the next launch relies on it, ``constants`` of
    those that no launch writes. An ``early`` one may start before those before it have ended.
    """

    kernel: object
    grid: tuple
    threads: tuple
    parameters: list
    shared_bytes: int
    tensor_maps: dict = field(default_factory=dict)
    counters: tuple = ()
    constants: tuple = ()
    early: bool = False


class Machine:
    """Executes waves of one launch. Instruction modules read its attributes, see `decode`."""

    def __init__(self, launch, memory, options):
        kernel, self.launch, self.options = launch.kernel, launch, options
        self.kernel, self.memory, self.counts = kernel, memory, Counts()
        self.block_threads = int(np.prod(launch.threads))
        if self.block_threads % 32:
            raise Unsupported(f"blocks of {self.block_threads} threads, not a multiple of 32")
        self.block_warps = self.block_threads // 32
        grid = int(np.prod(launch.grid))
        waves = grid if options.sample else -(-grid // options.wave)
        self.blocks = -(-grid // waves)
        self.count = self.blocks * self.block_threads
        self.warps = self.count // 32
        self.block = np.repeat(np.arange(self.blocks), self.block_threads)
        self.thread = np.arange(self.count)
        self._allocate()
        self.executed = [0] * len(kernel.instructions)
        self.code = [self.decode(instruction) for instruction in kernel.instructions]
        names = (instruction.name for instruction in kernel.instructions)
        self.barriers_at = {pc for pc, name in enumerate(names) if name.startswith("bar.sync")}

    def _allocate(self):
        kernel = self.kernel
        symbols, at = {}, 0
        static = [v for v in kernel.shared if v.size]
        for variable in static + [v for v in kernel.shared if not v.size]:
            at = -(-at // variable.alignment) * variable.alignment
            symbols[variable.name] = at
            at += variable.size
        if at + self.launch.shared_bytes > MOST_SHARED:
            total = at + self.launch.shared_bytes
            raise Fault("launch", f"{total} bytes of shared memory, more than {MOST_SHARED}")
        if self.block_threads > 1024:
            raise Fault("launch", f"a block of {self.block_threads} threads, more than 1024")
        self.shared = Memory("shared", at + self.launch.shared_bytes, self.blocks)
        local = 0
        for variable in kernel.local:
            local = -(-local // variable.alignment) * variable.alignment
            symbols[variable.name] = local
            local += variable.size
        self.local = Memory("local", local, self.count)
        at = 0
        self.parameter_at = {}
        for variable in kernel.parameters:
            at = -(-at // variable.alignment) * variable.alignment
            self.parameter_at[variable.name] = at
            at += variable.size
        symbols |= self.parameter_at
        self.parameters = Memory("param", at)
        if len(self.launch.parameters) != len(kernel.parameters):
            expected, got = len(kernel.parameters), len(self.launch.parameters)
            raise ValueError(f"{kernel.name} takes {expected} parameters, got {got}")
        for variable, data in zip(kernel.parameters, self.launch.parameters, strict=True):
            start = self.parameter_at[variable.name]
            self.parameters.data[start : start + variable.size] = np.frombuffer(
                data[: variable.size].ljust(variable.size, b"\0"), np.uint8
            )
            self.parameters.defined[start : start + variable.size] = 0xFF
        self.registers = Registers(kernel.registers, self.count, symbols)
        total = int(np.prod(self.launch.grid)) * self.block_warps if self._synchronises() else 0
        fences = any(i.name.startswith("fence.proxy") for i in self.kernel.instructions)
        self.order = Order(
            self.blocks,
            self.block_warps,
            self.shared.stride,
            self._granule("shared"),
            total,
            fences,
        )
        # A sample of blocks is not whole, and none of them has the others' results.
        self.global_order = None
        if not self.options.sample:
            self.global_order = GlobalOrder(self.memory, self.block_warps, self._granule("global"))

    def _granule(self, space):
        """Return the smallest access to a space: races are looked for at this size."""
        sizes = [16]
        for instruction in self.kernel.instructions:
            parts = instruction.parts
            accessed = transfers.state_space(parts) in (space, "generic")
            if parts[0] in ("ld", "ldu", "st", "atom", "red") and accessed:
                sizes.append(SIZES[parts[-1]])
            elif parts[:3] in (["cp", "async", "ca"], ["cp", "async", "cg"]):
                sizes.append(int(instruction.operands[2], 0))
            elif parts[0] == "mbarrier":
                sizes.append(8)
            elif parts[:4] == ["cp", "async", "bulk", "tensor"]:
                sizes.append(2)
        return min(sizes)

    def _synchronises(self):
        """Return whether blocks can be ordered among each other."""
        return not self.options.sample and any(
            instruction.parts[0] in ("atom", "red", "membar")
            or instruction.parts[:2] in (["fence", "acq_rel"], ["fence", "sc"])
            or instruction.parts[0] in ("ld", "st")
            and set(STRONG) & set(instruction.parts)
            for instruction in self.kernel.instructions
        )

    # Decoding.

    def decode(self, instruction):
        """Return (guard register or None, negated, function, whether it changes control flow)."""
        parts = instruction.parts
        guard = instruction.guard and self.registers.index[instruction.guard]
        for length in range(len(parts), 0, -1):
            build = TABLE.get(".".join(parts[:length]))
            if build:
                run = build(instruction, self)
                return guard, instruction.negated, run, getattr(build, "is_control", False)
        raise Unsupported(f"unknown instruction: {instruction}")

    def memory_of(self, space):
        """Return (memory, window of each thread) of a state space."""
        memories = {
            "global": (self.memory, 0),
            "shared": (self.shared, self.block),
            "local": (self.local, self.thread),
            "param": (self.parameters, 0),
        }
        if space not in memories:
            raise Unsupported(f"state space {space}")
        return memories[space]

    def whole_warps(self, active):
        """Return which warps run; a collective instruction needs all lanes of each of them."""
        if active is None:
            return np.ones(self.warps, bool)
        lanes = active.reshape(-1, 32)
        some = lanes.any(1)
        if not lanes[some].all():
            raise Fault("divergence", "not all lanes of a warp are here")
        return some

    def running(self, active):
        """Return the mask of the threads that run, also where that is all of them."""
        return np.ones(self.count, bool) if active is None else active

    def lost(self, lost, order, granules, thread, at):
        """Look at values that another thread overwrote in the same instruction by another one.

        Compilers let lanes that hold one value store it each, and rounding may part such values:
        within a warp that is counted, between warps it is a race.
        """
        self.counts.overwritten += int(lost.sum())
        if order is not None:
            order.check_winners(granules[lost], thread[lost], at)

    # Running.

    def run(self):
        """Execute the whole grid and return the counts."""
        if self.options.sample:
            return self._run_sample()
        x, y, z = self.launch.grid
        ids = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        if self.options.blocks is not None:
            random.Random(self.options.blocks).shuffle(ids)
        before = {key: self.memory.read(key)[0].copy() for key in self.launch.counters}
        with np.errstate(all="ignore"):
            for start in range(0, len(ids), self.blocks):
                self._wave(ids[start : start + self.blocks])
        for key, data in before.items():
            if not np.array_equal(self.memory.read(key)[0], data):
                raise Fault("counter", f"{self.kernel.name} does not leave {key!r} as it found it")
        self.counts.blocks += len(ids)
        self._count_instructions()
        return self.counts

    def _count_instructions(self):
        for instruction, times in zip(self.kernel.instructions, self.executed, strict=True):
            if times:
                self.counts.instructions[instruction_class(instruction.name)] += times

    def _run_sample(self):
        """Execute some blocks, one at a time; return the counts of all that they stand for."""
        total = Counts()
        axes = [_representatives(size) for size in self.launch.grid]
        with np.errstate(all="ignore"):
            for (i, x), (j, y), (k, z) in itertools.product(*axes):
                self.counts = Counts(blocks=1)
                self.executed[:] = [0] * len(self.executed)
                self._wave([(i, j, k)])
                self._count_instructions()
                total += self.counts.times(x * y * z)
        return total

    def _wave(self, ids):
        self.registers.reset()
        self._set_special(ids)
        self.shared.forget()
        self.order.reset()
        if self.global_order:
            x, y, _ = self.launch.grid
            self.global_order.begin_wave(self.order, [i + x * (j + y * k) for i, j, k in ids])
        self.copies = transfers.Pending(self)
        self.products = warpgroup.Products(self)
        self.barriers = barriers.Barriers(self)
        self.mbarriers = barriers.MBarriers(self)
        self.bulk = bulk.Copies(self)
        self.dependencies = dependencies.Dependencies(self)
        self.live = self.block < len(ids)
        self.everyone = None if self.live.all() else self.live
        self.allotted = np.zeros(self.warps, int)  # registers of a thread, where setmaxnreg said
        self.ready = []
        self.steps = self.pc = 0
        for rank in np.unique(self.rank):
            self.make_ready(0, self.live & (self.rank == rank), rank)
        try:
            while self.ready or self.barriers.resume() or self.mbarriers.resume():
                self._run(min(self.ready, key=lambda group: (group.waits, group.rank, group.pc)))
            barriers.check_allotted(self)
        except Fault as fault:
            where = self.kernel.instructions[self.pc]
            message = f"{fault.message}\n  at instruction {self.pc} of {self.kernel.name}: {where}"
            raise Fault(fault.kind, message) from None

    def make_ready(self, pc, mask, rank):
        """Let threads run on at ``pc``, unless there are none."""
        if mask.any():
            self.ready.append(Group(pc, mask, rank))

    def _set_special(self, ids):
        special, shape = self.registers.special, self.launch.threads
        inside = self.thread % self.block_threads
        ids = np.array(ids + [ids[-1]] * (self.blocks - len(ids)))[self.block]
        strides = (1, shape[0], shape[0] * shape[1])
        for axis, name in enumerate("xyz"):
            special[f"%tid.{name}"] = inside // strides[axis] % shape[axis]
            special[f"%ctaid.{name}"] = ids[:, axis]
            special[f"%ntid.{name}"] = np.full(self.count, shape[axis])
            special[f"%nctaid.{name}"] = np.full(self.count, self.launch.grid[axis])
        special["%laneid"], special["%warpid"] = self.thread % 32, inside // 32
        special["%lanemask_lt"] = (1 << self.thread % 32) - 1
        special["%cluster_ctarank"] = np.zeros(self.count, int)  # every cluster is one block
        self.rank = np.zeros(self.count, int)
        if self.options.warps is not None:
            # The warps of a warpgroup issue these together.
            together = ("wgmma", "setmaxnreg")
            unit = 4 if any(i.name.startswith(together) for i in self.kernel.instructions) else 1
            order = list(range(-(-self.block_warps // unit)))
            random.Random(self.options.warps).shuffle(order)
            self.rank = np.array(order)[inside // (32 * unit)]

    def _run(self, group):
        """Run a group until it waits, parts, leaves or meets another one."""
        self.ready.remove(group)
        for other in [g for g in self.ready if g.pc == group.pc and g.rank == group.rank]:
            self.ready.remove(other)
            group.mask = group.mask | other.mask
        others = [g for g in self.ready if g.rank == group.rank]
        stop = min((g.pc for g in others if not g.waits), default=NOWHERE)
        meeting = {g.pc for g in others if g.waits}
        group_mask, group_active = group.mask, group.mask
        if group.mask.sum() == self.live.sum():
            group_mask, group_active = None, self.everyone
        running = int(group.mask.reshape(-1, 32).any(1).sum())
        code, executed = self.code, self.executed
        values, undefined = self.registers.values, self.registers.undefined
        pc, group.waits, threads = group.pc, False, np.count_nonzero(group.mask)
        while pc < stop and pc not in meeting:
            self.pc = pc
            if pc in self.barriers_at and self._parted(group):
                group.waits = True
                break
            executed[pc] += running
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise Fault("deadlock", f"no end after {MAX_STEPS} instructions")
            guard, negated, function, is_control = code[pc]
            mask, active, chosen = group_mask, group_active, group.mask
            if guard is not None:
                self.registers.decided(undefined[guard], active, "the guard")
                chosen = (~values[guard] if negated else values[guard]) & group.mask
                some = np.count_nonzero(chosen)
                if not some:
                    pc += 1
                    continue
                if some != threads:
                    mask = active = chosen
            if is_control:
                group.pc = pc
                pc = function(group, chosen)
                if pc is None:
                    return
            else:
                function(mask, active)
                pc += 1
        group.pc = pc
        self.ready.append(group)

    def _parted(self, group):
        """Return whether lanes of the group's warps are still on other paths."""
        warps = group.mask.reshape(-1, 32).any(1)
        others = [g.mask for g in self.ready if not g.waits]
        return any(mask.reshape(-1, 32)[warps].any() for mask in others)


def _representatives(size):
    """Return (index, how many it stands for) along one axis of a grid."""
    if size <= 3:
        return [(index, 1) for index in range(size)]
    return [(0, 1), (1, size - 2), (size - 1, 1)]


def _branch(instruction, machine):
    target = machine.kernel.labels[instruction.operands[-1]]

    def run(group, chosen):
        if chosen is group.mask or (chosen == group.mask).all():
            return target
        machine.make_ready(target, chosen, group.rank)
        machine.make_ready(group.pc + 1, group.mask & ~chosen, group.rank)
        return None

    return run


def _branch_by_index(instruction, machine):
    """brx.idx: every thread takes the branch that its index names in a table."""
    index, table = instruction.operands
    read = machine.registers.reader(index, "u32")
    targets = [machine.kernel.labels[name] for name in machine.kernel.targets[table]]

    def run(group, chosen):
        value, undefined = read()
        machine.registers.decided(undefined, chosen, "the branch index")
        if (value[chosen] >= len(targets)).any():
            raise Fault("bounds", f"a branch index beyond the {len(targets)} targets")
        for number, target in enumerate(targets):
            machine.make_ready(target, chosen & (value == number), group.rank)
        machine.make_ready(group.pc + 1, group.mask & ~chosen, group.rank)

    return run


def _exit(instruction, machine):
    def run(group, chosen):
        machine.live = machine.everyone = machine.live & ~chosen
        machine.make_ready(group.pc + 1, group.mask & ~chosen, group.rank)

    return run


_branch.is_control = _branch_by_index.is_control = _exit.is_control = True
TABLE |= {"bra": _branch, "brx.idx": _branch_by_index, "ret": _exit, "exit": _exit}
