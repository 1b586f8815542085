"""Races in global memory, by the same clocks as in shared memory (`order.py`), over a whole grid.

Within a block barriers order accesses. Between blocks only what a release publishes at an address
and an acquire finds there does: atomics, loads and stores that say so, or relaxed ones beside
`fence` or `membar` of the GPU, before a barrier or behind one too. Blocks that run one after the
other are not ordered by that. Strong accesses do not race with each other. ``ld.global.nc`` may
read nothing that the launch writes. Of the readers of a granule the last is kept for each number of
a warp in its block.
"""

import numpy as np

from .faults import Fault

NOBODY = -1
SCOPES = ("gpu", "sys", "gl")
STRONG = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")


class GlobalOrder:
    """Last accesses to global memory in granules of ``granule`` bytes, by threads of the grid."""

    def __init__(self, memory, warps, granule):
        self.memory, self.warps, self.granule = memory, warps, granule
        size = memory.stride // granule
        self.write_clock = np.zeros(size, np.int32)
        self.write_thread = np.full(size, NOBODY, np.int64)
        self.write_at = np.zeros(size, np.int32)
        self.strong = np.zeros(size, bool)
        self.read_clock = np.zeros((warps, size), np.int32)
        self.read_thread = np.zeros((warps, size), np.int64)
        self.published = {}  # address: what a release has published there [warps of the grid]

    def begin_wave(self, order, numbers):
        """Follow the clocks of a wave whose blocks have these numbers in the grid."""
        self.order = order
        self.numbers = np.zeros(order.blocks, np.int64)
        self.numbers[: len(numbers)] = numbers

    def _threads(self, thread):
        """Return the numbers in the grid of threads of the wave."""
        block, inside = np.divmod(thread, 32 * self.warps)
        return self.numbers[block] * 32 * self.warps + inside

    def granules(self, index, size):
        """Return the granules [accesses, n] of accesses given in words of ``size`` bytes."""
        count = max(size // self.granule, 1)
        return index[:, None] * count + np.arange(count)

    def read(self, granules, thread, at, *, strong=False, constant=False):
        """Check and record reads; ``constant`` ones see what was there before the launch."""
        mine, warp = self._threads(thread)[:, None], thread[:, None] // 32
        writer = self.write_thread.take(granules)
        if constant and (writer != NOBODY).any():
            self._fail(granules, writer != NOBODY, mine, at, "read by ld.global.nc")
        self._after_writes(granules, mine, warp, at, "read", strong)
        if strong:
            return
        own = np.broadcast_to(warp % self.warps, granules.shape)
        clock = np.broadcast_to(self.order.clock[warp], granules.shape)
        several = (self.read_clock[own, granules] == clock) & (
            self.read_thread[own, granules] // 32 == mine // 32
        )
        several &= self.read_thread[own, granules] != mine
        self.read_clock[own, granules] = clock
        self.read_thread[own, granules] = np.where(several, -1 - mine, mine)  # of several lanes
        lost = (self.read_thread[own, granules] != mine) & ~several
        self.read_thread[own[lost], granules[lost]] = -1 - np.broadcast_to(mine, lost.shape)[lost]

    def write(self, granules, thread, at, *, same=None, strong=False):
        """Check and record writes; those of what is there already (``same``) need no order."""
        mine, warp = self._threads(thread)[:, None], thread[:, None] // 32
        new = slice(None) if same is None else ~same
        self._after_writes(granules[new], mine[new], warp[new], at, "write", strong)
        self._after_reads(granules[new], mine[new], warp[new], at)
        self.write_clock[granules] = np.broadcast_to(self.order.clock[warp], granules.shape)
        self.write_thread[granules] = mine
        self.write_at[granules] = at
        self.strong[granules] = strong

    def check_winners(self, granules, thread, at):
        """Fail if another warp has overwritten what a thread wrote in the same instruction."""
        mine = self._threads(thread)[:, None]
        bad = self.write_thread.take(granules) // 32 != mine // 32
        self._fail(granules, bad, mine, at, "write")

    def synchronise(self, address, thread, parts, reads=True, writes=True):
        """Let a thread acquire what is published at an address, release to it, or both."""
        if "cta" in parts:
            return
        order, warp = self.order, thread // 32
        found = self.published.setdefault(address, np.zeros(order.total, np.int32))
        if reads:
            strong = "acquire" in parts or "acq_rel" in parts
            target = order.far[warp] if strong else order.pending[warp]
            np.maximum(target, found, out=target)
        if writes:
            if "release" in parts or "acq_rel" in parts:
                np.maximum(found, self._all_seen(warp), out=found)
                order.advance(np.array([warp]))
            else:
                np.maximum(found, order.fenced[warp], out=found)

    def fence(self, warps):
        """Let relaxed accesses behind it publish what warps have seen, and use what came before."""
        order = self.order
        for warp in warps:
            np.maximum(order.far[warp], order.pending[warp], out=order.far[warp])
            np.maximum(order.fenced[warp], self._all_seen(warp), out=order.fenced[warp])
        order.advance(warps)

    def _all_seen(self, warp):
        """Return what a warp has seen of all warps of the grid, itself among them."""
        order, block = self.order, warp // self.warps
        seen = order.far[warp].copy()
        first = self.numbers[block] * self.warps
        own = seen[first : first + self.warps]
        np.maximum(own, order.seen[warp, : self.warps], out=own)
        own[warp % self.warps] = order.clock[warp]
        return seen

    def _is_seen(self, other, clock, mine, warp):
        """Return whether accesses of threads at their clocks come before what warps do now."""
        order, by = self.order, other // 32
        here = by // self.warps == mine // 32 // self.warps
        seen = np.where(here, order.seen[warp, by % self.warps], 0)
        if order.total:
            seen = np.maximum(seen, order.far[warp, by])
        return clock <= seen

    def _after_writes(self, granules, mine, warp, at, what, strong):
        writer = self.write_thread.take(granules)
        bad = (writer != NOBODY) & (writer != mine)
        if strong:
            bad &= ~self.strong.take(granules)
        if np.count_nonzero(bad):
            bad &= ~self._is_seen(writer, self.write_clock.take(granules), mine, warp)
            self._fail(granules, bad, mine, at, what)

    def _after_reads(self, granules, mine, warp, at):
        for number in range(self.warps):
            clock = self.read_clock[number].take(granules)
            reader = self.read_thread[number].take(granules)
            bad = (clock > 0) & (reader != mine)
            if np.count_nonzero(bad):
                reader = np.where(reader < 0, -1 - reader, reader)
                bad &= ~self._is_seen(reader, clock, mine, warp)
                self._fail(granules, bad, mine, at, "write", reader)

    def _fail(self, granules, bad, mine, at, what, reader=None):
        if not np.count_nonzero(bad):
            return
        granule = int(granules[bad][0])
        other = self.write_thread[granule] if reader is None else reader[bad][0]
        verb = "the write" if reader is None else "a read"
        by = f" by instruction {self.write_at[granule]}" if reader is None else ""
        (block, thread), (other_block, other) = (
            divmod(int(x), 32 * self.warps)
            for x in (np.broadcast_to(mine, bad.shape)[bad][0], other)
        )
        address = self.memory.address_of(granule * self.granule)
        raise Fault(
            "race",
            f"{what} of global memory at {address:#x}{self.memory.nearby(address)} by thread "
            f"{thread} of block {block} (instruction {at}) is not ordered after {verb} of thread "
            f"{other} of block {other_block}{by}",
        )
