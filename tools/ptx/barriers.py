"""Barriers of a block, barriers in shared memory (mbarrier), fences."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from .faults import Fault, Unsupported
from .transfers import Place, nothing

REGISTERS = 65536  # of a multiprocessor


class Barriers:
    """The numbered barriers of every block: who has arrived, who waits where."""

    def __init__(self, machine):
        self.machine = machine
        self.arrived = defaultdict(lambda: np.zeros(machine.count, bool))
        self.published = defaultdict(machine.order.unpublished)
        self.waiting = defaultdict(list)  # number: [(next instruction, threads, rank)]

    def arrive(self, number, expected, threads):
        """Count threads at a barrier; return the threads of the blocks that it now lets go."""
        machine, arrived = self.machine, self.arrived[number]
        if (arrived & threads).any():
            raise Fault("barrier", f"a thread arrives at barrier {number} twice")
        machine.order.release(_warps(threads), self.published[number])
        arrived |= threads
        counts = arrived.reshape(machine.blocks, -1).sum(1)
        if (counts > expected).any():
            raise Fault("barrier", f"more than {expected} threads at barrier {number}")
        complete = counts == expected
        machine.counts.barriers += int(complete.sum())
        return complete

    def sync(self, number, expected, threads, pc, rank):
        """Let threads arrive and wait."""
        self.waiting[number].append((pc, threads, rank))
        self.open(number, self.arrive(number, expected, threads))

    def open(self, number, complete):
        """Let the waiting threads of blocks go on."""
        if not complete.any():
            return
        machine = self.machine
        released = complete[machine.block]
        left = []
        for pc, threads, rank in self.waiting[number]:
            gone = threads & released
            machine.order.acquire(_warps(gone), self.published[number])
            machine.make_ready(pc, gone, rank)
            if not gone.all() and (threads & ~gone).any():
                left.append((pc, threads & ~gone, rank))
        self.waiting[number] = left
        self.arrived[number] &= ~released
        self.published[number][complete] = 0

    def resume(self):
        """Nothing else can run: fail if threads still wait, for the others will never come."""
        for number, entries in self.waiting.items():
            if entries and not self.machine.mbarriers.waiting and not self.machine.ready:
                pc, threads, _ = entries[0]
                block = np.flatnonzero(threads)[0] // self.machine.block_threads
                here = self.arrived[number].reshape(self.machine.blocks, -1)[block].sum()
                self.machine.pc = pc - 1
                raise Fault(
                    "barrier",
                    f"{here} of {self.machine.block_threads} threads of block {block} of the wave "
                    f"wait at barrier {number} and no other thread comes",
                )
        return False


def _warps(threads):
    return np.flatnonzero(threads.reshape(-1, 32).any(1))


def _numbers(operand, machine, threads):
    """Return what each thread names: a barrier, or how many threads it is for."""
    if operand is None:
        return np.full(machine.count, machine.block_threads)
    value, undefined = machine.registers.reader(operand, "u32")()
    machine.registers.decided(undefined, threads, "the barrier's number or count")
    return value


def barrier(instruction, machine):
    """Bar and barrier: sync and arrive, of all threads of a block or of a count of them."""
    parts, operands = instruction.parts, [*instruction.operands, None]
    parts = [part for part in parts if part not in ("cta", "aligned")]
    if parts[1:2] not in (["sync"], ["arrive"]) or len(parts) > 2:
        raise Unsupported(f"unknown instruction: {instruction}")
    aligned = parts[0] == "bar" or "aligned" in instruction.parts

    def run(group, chosen):
        if aligned:
            machine.whole_warps(chosen | ~machine.live)
        numbers = _numbers(operands[0], machine, chosen)
        counts = _numbers(operands[1], machine, chosen)
        machine.make_ready(group.pc + 1, group.mask & ~chosen, group.rank)
        if parts[1] == "arrive":
            machine.make_ready(group.pc + 1, chosen, group.rank)
        named = {(int(n), int(c)) for n, c in zip(numbers[chosen], counts[chosen], strict=True)}
        for number, expected in sorted(named):
            threads = chosen & (numbers == number) & (counts == expected)
            if parts[1] == "sync":
                machine.barriers.sync(number, expected, threads, group.pc + 1, group.rank)
            else:
                complete = machine.barriers.arrive(number, expected, threads)
                machine.barriers.open(number, complete)

    return run


def warp_barrier(instruction, machine):
    """bar.warp.sync: orders the accesses of a warp's lanes."""

    def run(mask, active):
        machine.order.synchronise_lanes(np.flatnonzero(machine.whole_warps(active)))

    return run


@dataclass
class State:
    """An mbarrier: arrivals and bytes that its current phase still waits for."""

    count: int
    pending: int
    published: np.ndarray
    bytes: int = 0
    phase: int = 0
    uncounted: list = field(default_factory=list)  # (warp, its clock) that `MBarriers.count` tells


class MBarriers:
    """All mbarriers of a wave, by (block, address)."""

    def __init__(self, machine):
        self.machine, self.states, self.waiting = machine, {}, []

    def create(self, key, count):
        """Initialise one."""
        self.states[key] = State(count, count, self.machine.order.unpublished())

    def state(self, key):
        """Return the one at (block, address)."""
        if key not in self.states:
            raise Fault("barrier", f"no mbarrier has been initialised at shared byte {key[1]}")
        return self.states[key]

    def count(self, key, warp):
        """Count one arrival more in this phase.

        An arrival that the phase needs must come after it, by the clocks: or else the phase may be
        over before it is counted.
        """
        state = self.state(key)
        state.pending += 1
        state.uncounted.append((warp, self.machine.order.clock[warp]))

    def arrive(self, key, warp, count, needed=True):
        """Count arrivals of a warp; they are not ``needed`` if they were counted just before."""
        state = self.state(key)
        if warp is not None and needed:
            seen, own = self.machine.order.seen[warp], self.machine.block_warps
            state.uncounted = [
                (other, clock)
                for other, clock in state.uncounted
                if other != warp and seen[other % own] < clock
            ]
        if warp is not None:
            self.machine.order.release(np.array([warp]), state.published)
        state.pending -= count
        if state.pending < 0:
            raise Fault("barrier", f"more arrivals than the mbarrier at {key[1]} expects")
        self.turn(state)

    def turn(self, state):
        """Begin the next phase if nothing is missing."""
        if state.pending == 0 and state.bytes == 0:
            if state.uncounted:
                warp = state.uncounted[0][0]
                raise Fault(
                    "race",
                    f"a phase may be over before copies of warp {warp} count: no arrival "
                    "that it needs is ordered after cp.async.mbarrier.arrive",
                )
            state.phase += 1
            state.pending = state.count
            self.machine.counts.barriers += 1

    def passed(self, keys, parities):
        """Return whether the phase of each parity is over."""
        states = [self.state(key) for key in keys]
        return np.array([s.phase & 1 != p for s, p in zip(states, parities, strict=True)], bool)

    def resume(self):
        """Let threads try again whose phases are over; land a copy if that is all that is left."""
        while self.waiting:
            waiting, self.waiting = self.waiting, []
            for pc, threads, rank, keys, parities in waiting:
                done = self.passed(keys, parities)
                if done.any():
                    self.machine.make_ready(pc, threads, rank)
                else:
                    self.waiting.append((pc, threads, rank, keys, parities))
            if self.machine.ready:
                return True
            if not self.machine.bulk.land_one():
                pc, threads, _, keys, parities = self.waiting[0]
                self.machine.pc = pc
                raise Fault(
                    "barrier",
                    f"{threads.sum()} threads wait for a phase of parity {parities[0]} of the "
                    f"mbarrier at shared byte {keys[0][1]}, which nobody completes",
                )
        return False


class MBarrierOperand(Place):
    """The address of an mbarrier, whose initialisation must come before any use."""

    def __init__(self, operand, machine, at):
        super().__init__(operand, "shared", 8, machine, at)

    def keys(self, threads, initialises=False):
        """Return the (block, address) of every chosen thread."""
        _, index = self.resolve(threads)
        place, order = self.now[1], self.machine.order
        if not initialises:
            thread = np.flatnonzero(threads)[:, None]
            granules = order.granules(index[threads], 8)
            order._after_writes(granules, thread, thread // 32, self.at, "use of the mbarrier at")
        return [(int(self.machine.block[t]), int(place[t])) for t in np.flatnonzero(threads)]


def mbarrier_init(instruction, machine):
    """mbarrier.init."""
    place = MBarrierOperand(instruction.operands[0], machine, instruction.index)
    read = machine.registers.reader(instruction.operands[1], "u32")

    def run(mask, active):
        threads = machine.running(active)
        counts = read()[0][threads]
        place.write(np.zeros(machine.count, np.uint64), None, threads)
        for key, count in zip(place.keys(threads, True), counts, strict=True):
            machine.mbarriers.create(key, int(count))

    return run


def mbarrier_arrive(instruction, machine):
    """mbarrier.arrive, .expect_tx, .complete_tx and arrive.expect_tx."""
    parts, operands = instruction.parts, list(instruction.operands)
    arrives = parts[1] == "arrive"
    if arrives and not operands[0].startswith("[") and operands.pop(0) != "_":
        raise Unsupported(f"the state of an mbarrier: {instruction}")
    place = MBarrierOperand(operands[0], machine, instruction.index)
    read = machine.registers.reader(operands[1] if len(operands) > 1 else "1", "u32")
    sign = -1 if "complete_tx" in parts else 1
    transaction = "expect_tx" in parts or "complete_tx" in parts

    def run(mask, active):
        threads = machine.running(active)
        amounts = read()[0]
        for thread, key in zip(np.flatnonzero(threads), place.keys(threads), strict=True):
            state = machine.mbarriers.state(key)
            if transaction:
                state.bytes += sign * int(amounts[thread])
            if arrives:
                count = 1 if transaction else int(amounts[thread])
                machine.mbarriers.arrive(key, thread // 32, count)
            else:
                machine.mbarriers.turn(state)

    return run


def mbarrier_wait(instruction, machine):
    """mbarrier.try_wait.parity and test_wait.parity: here threads wait until the phase is over."""
    if "parity" not in instruction.parts:
        raise Unsupported(f"unknown instruction: {instruction}")
    write = machine.registers.writer(instruction.operands[0], "pred")
    place = MBarrierOperand(instruction.operands[1], machine, instruction.index)
    read = machine.registers.reader(instruction.operands[2], "u32")
    is_repeated = _is_repeated(instruction, machine)

    def run(group, chosen):
        if not is_repeated:
            raise Fault("barrier", f"no loop around {instruction.name}, which may return false")
        keys, parities = place.keys(chosen), read()[0][chosen]
        passed = machine.mbarriers.passed(keys, parities)
        done = chosen.copy()
        done[chosen] = passed
        if (chosen & ~done).any():
            stay = [i for i, over in enumerate(passed) if not over]
            machine.mbarriers.waiting.append(
                (group.pc, chosen & ~done, group.rank, [keys[i] for i in stay], parities[stay])
            )
        for key in {key for key, over in zip(keys, passed, strict=True) if over}:
            threads = done & (machine.block == key[0])
            machine.order.acquire(_warps(threads), machine.mbarriers.state(key).published)
        write(np.ones(machine.count, bool), None, done)
        machine.make_ready(group.pc + 1, done | (group.mask & ~chosen), group.rank)

    return run


def _is_repeated(instruction, machine):
    """Return whether a branch that the wait's answer decides follows it soon."""
    later = machine.kernel.instructions[instruction.index + 1 : instruction.index + 9]
    return any(x.parts[0] == "bra" and x.guard == instruction.operands[0] for x in later)


def mbarrier_invalidate(instruction, machine):
    """mbarrier.inval: the bytes are free for other use."""
    place = MBarrierOperand(instruction.operands[0], machine, instruction.index)

    def run(mask, active):
        threads = machine.running(active)
        place.write(np.zeros(machine.count, np.uint64), None, threads)
        for key in place.keys(threads):
            machine.mbarriers.state(key)
            del machine.mbarriers.states[key]

    return run


def copies_arrive(instruction, machine):
    """cp.async.mbarrier.arrive: arrives when the thread's copies have landed, here at once."""
    place = MBarrierOperand(instruction.operands[0], machine, instruction.index)
    counted = "noinc" in instruction.parts

    def run(mask, active):
        threads = machine.running(active)
        machine.copies.commit(threads)
        machine.copies.wait(threads, 0)
        for thread, key in zip(np.flatnonzero(threads), place.keys(threads), strict=True):
            if not counted:
                machine.mbarriers.count(key, thread // 32)
            machine.mbarriers.arrive(key, thread // 32, 1, needed=counted)

    return run


def proxy_fence(instruction, machine):
    """fence.proxy.async: the asynchronous proxy sees what this warp wrote or has seen written."""

    def run(mask, active):
        machine.order.fence_proxy(_warps(machine.running(active)))

    return run


def check_allotted(machine):
    """Fail if the registers that the warps of a block ended with are more than there are."""
    allotted = machine.allotted.reshape(machine.blocks, -1)
    most = int((32 * allotted.sum(1) * (allotted > 0).all(1)).max())
    if most > REGISTERS:
        raise Fault("launch", f"{most} registers of a block, more than {REGISTERS}")


def allot(instruction, machine):
    """setmaxnreg: a whole warpgroup takes registers, or gives some; a GPU waits until there are."""
    count = int(instruction.operands[0], 0)
    if count % 8 or not 24 <= count <= 256:
        raise Fault("launch", f"setmaxnreg of {count}, not a multiple of 8 from 24 to 256")

    def run(mask, active):
        warps = machine.whole_warps(active)
        if not warps.reshape(-1, 4)[warps.reshape(-1, 4).any(1)].all():
            raise Fault("divergence", "not all warps of a warpgroup are at setmaxnreg")
        machine.allotted[warps] = count

    return run


barrier.is_control = mbarrier_wait.is_control = True
INSTRUCTIONS = {
    "bar": barrier,
    "barrier": barrier,
    "bar.warp.sync": warp_barrier,
    "mbarrier.init": mbarrier_init,
    "mbarrier.inval": mbarrier_invalidate,
    "mbarrier.arrive": mbarrier_arrive,
    "mbarrier.expect_tx": mbarrier_arrive,
    "mbarrier.complete_tx": mbarrier_arrive,
    "mbarrier.try_wait": mbarrier_wait,
    "mbarrier.test_wait": mbarrier_wait,
    "cp.async.mbarrier.arrive": copies_arrive,
    "fence.proxy.async": proxy_fence,
    "fence.mbarrier_init": nothing,
    # Nothing that the emulator checks.
    "setmaxnreg": allot,
    "nanosleep": nothing,
}
