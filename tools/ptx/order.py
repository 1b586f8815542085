"""Races in shared memory, by happens-before: vector clocks of warps over every granule of bytes.

Two accesses to one granule of which one writes must be ordered by a barrier, a wait or an mbarrier,
whatever the schedule of this run was. Warp ``w`` stamps its accesses with its clock. Releasing
(arriving at a barrier) publishes what it has done and advances the clock; acquiring (leaving the
barrier) takes over what others published. Lanes of one warp are not ordered among each other
either, but a thread is ordered with itself.

An asynchronous copy or product is stamped ``PENDING`` until its wait: nobody's clock has seen that,
not even the issuing thread's. What the generic proxy wrote is ``unfenced`` for the asynchronous one
(wgmma, TMA) until a warp that has seen the write executes ``fence.proxy.async``, and the issuing
one has seen that.
"""

import numpy as np

from .faults import Fault

PENDING = 1 << 30
NOBODY = -1
BULK = -2  # the writer of what a bulk copy has written


class Order:
    """Clocks and last accesses of the blocks of a wave; a granule is ``granule`` bytes."""

    def __init__(self, blocks, warps, window, granule, total=0, fences=False):
        self.blocks, self.warps, self.granule, self.total = blocks, warps, granule, total
        self.fences = fences  # whether the kernel fences the asynchronous proxy at all
        self.per_block = window // granule
        self.size = blocks * self.per_block
        self.reset()

    def reset(self):
        """Start anew: nothing accessed, nobody has seen anybody."""
        total = self.blocks * self.warps
        self.clock = np.ones(total, np.int32)
        # Of the warps of the block, of bulk copies, and three times of all warps of the grid: what
        # was acquired, what a fence lets relaxed accesses publish, what waits for a fence.
        self.seen = np.zeros((total, self.warps + 1 + 3 * self.total), np.int32)
        far = self.seen[:, self.warps + 1 :]
        self.far, self.fenced, self.pending = (
            far[:, i * self.total : (i + 1) * self.total] for i in range(3)
        )
        self.bulk_clock = np.zeros(self.blocks, np.int32)
        self.write_clock = np.zeros(self.size, np.int32)
        self.write_thread = np.full(self.size, NOBODY, np.int32)
        self.write_at = np.zeros(self.size, np.int32)
        self.read_clock = np.zeros((self.warps, self.size), np.int32)
        self.read_lane = np.zeros((self.warps, self.size), np.int8)
        self.unfenced = np.zeros(self.size, bool)
        # By warp: writes that its fence.proxy.async would cover, and its clock at the one that did.
        self.to_fence = np.zeros((self.warps, self.size), bool)
        self.fence_clock = np.zeros((self.warps, self.size), np.int32)

    def unpublished(self):
        """Return what a barrier has published before anyone has arrived, [blocks, as `seen`]."""
        return np.zeros((self.blocks, self.seen.shape[1]), np.int32)

    def granules(self, index, size):
        """Return the granules [accesses, n] of accesses given in words of ``size`` bytes."""
        count = max(size // self.granule, 1)
        return index[:, None] * count + np.arange(count)

    # Accesses: `granules` [accesses, n], `thread` [accesses] in the wave, `at` the instruction.

    def read(self, granules, thread, at):
        """Check and record reads of threads."""
        warp, lane = thread[:, None] // 32, thread[:, None] % 32
        self._after_writes(granules, thread[:, None], warp, at, "read")
        place = (warp % self.warps) * self.size + granules
        clock = np.broadcast_to(self.clock[warp], granules.shape)
        clocks, lanes = self.read_clock.reshape(-1), self.read_lane.reshape(-1)
        several = (clocks.take(place) == clock) & (lanes.take(place) != lane)
        clocks[place] = clock
        lanes[place] = np.where(several, NOBODY, lane)
        # Lanes that read the same granule in this very instruction overwrote each other.
        lanes[place[lanes.take(place) != lane]] = NOBODY

    def write(self, granules, thread, at, *, pending=False, same=None):
        """Check and record writes of threads; `pending` until `land`.

        Writes of what is there already (``same``, bool [accesses]) need no order among each other.
        """
        warp, lane = thread[:, None] // 32, thread[:, None] % 32
        new = slice(None) if same is None else ~same
        self._after_writes(granules[new], thread[new, None], warp[new], at, "write")
        self._after_reads(granules, thread[:, None], warp, lane, at)
        clock = PENDING if pending else np.broadcast_to(self.clock[warp], granules.shape)
        self.write_clock[granules] = clock
        self.write_thread[granules] = thread[:, None]
        self.write_at[granules] = at
        self.unfenced[granules] = True
        if self.fences:
            self.to_fence[:, granules] = True
            self.fence_clock[:, granules] = 0

    def check_winners(self, granules, thread, at):
        """Fail if another warp has overwritten what a thread wrote in the same instruction."""
        last = self.write_thread.take(granules)
        if (bad := last // 32 != thread[:, None] // 32).any():
            first = np.broadcast_to(thread[:, None], bad.shape)[bad][0]
            other = "that of another value by another warp in the same instruction"
            self._fail(granules[bad][0], first, at, "write", other)

    def land(self, granules, thread):
        """Make pending writes of threads ordinary ones: they have waited for them."""
        thread = np.broadcast_to(thread[:, None], granules.shape)
        own = (self.write_thread.take(granules) == thread) & (
            self.write_clock.take(granules) == PENDING
        )
        self.write_clock[granules[own]] = self.clock[thread[own] // 32]

    def hold(self, granules, warps, at):
        """Check and record asynchronous reads [n] by warps of one block, pending until `let_go`."""
        for warp in warps:
            thread = np.full((1, 1), 32 * warp)
            self._after_writes(granules[None], thread, thread // 32, at, "asynchronous read", False)
            self.read_clock[warp % self.warps, granules] = PENDING
            self._after_fences(granules[self.unfenced[granules]], warp, at)

    def let_go(self, granules, warps, still_held):
        """End asynchronous reads, except of granules that later ones still read."""
        for warp in warps:
            clocks = self.read_clock[warp % self.warps]
            clocks[granules] = self.clock[warp]
            for held in still_held:
                clocks[held] = PENDING

    def bulk_write(self, granules, thread, at):
        """Check and record a bulk copy's write [n] by a thread, pending until `bulk_land`."""
        thread = np.full((1, 1), thread)
        self._after_writes(granules[None], thread, thread // 32, at, "bulk write")
        self._after_reads(granules[None], thread, thread // 32, thread % 32, at)
        self.write_clock[granules], self.write_thread[granules] = PENDING, BULK
        self.write_at[granules], self.unfenced[granules] = at, False

    def bulk_land(self, granules, published):
        """End a bulk copy: who acquires ``published`` from its mbarrier may read what it wrote."""
        block = granules[0] // self.per_block
        self.bulk_clock[block] += 1
        self.write_clock[granules] = self.bulk_clock[block]
        published[block, self.warps] = self.bulk_clock[block]

    # Synchronisation.

    def release(self, warps, published):
        """Add what warps [n] have done to ``published``; advance their clocks."""
        own = warps % self.warps
        rows = self.seen[warps]
        rows[np.arange(len(warps)), own] = self.clock[warps]
        np.maximum.at(published, warps // self.warps, rows)
        self.advance(warps)

    def advance(self, warps):
        """Let what warps do from now on be later than what they have published."""
        self.clock[warps] += 1
        self.seen[warps, warps % self.warps] = self.clock[warps] - 1

    def acquire(self, warps, published):
        """Let warps [n] see what their block's ``published`` holds."""
        self.seen[warps] = np.maximum(self.seen[warps], published[warps // self.warps])

    def synchronise_lanes(self, warps):
        """Order the lanes of warps among each other."""
        self.advance(warps)

    def fence_proxy(self, warps):
        """Make what warps [n] have written or seen written visible to the asynchronous proxy."""
        for warp in warps:
            own, first = warp % self.warps, warp // self.warps * self.per_block
            granules = first + np.flatnonzero(self.to_fence[own, first : first + self.per_block])
            seen = self.seen[warp, : self.warps + 1].copy()
            seen[own] = self.clock[warp]
            writer = self._column(self.write_thread[granules])
            done = granules[self.write_clock[granules] <= seen[writer]]
            self.fence_clock[own, done] = self.clock[warp]
            self.to_fence[own, done] = False

    # Checks.

    def _column(self, writer):
        return np.where(writer == BULK, self.warps, writer // 32 % self.warps)

    def _after_writes(self, granules, thread, warp, at, what, own_is_ordered=True):
        clock = self.write_clock.take(granules)
        writer = self.write_thread.take(granules)
        bad = clock > self.seen[warp, self._column(writer)]
        if own_is_ordered:
            bad &= (writer != thread) | (clock == PENDING)
        elif np.count_nonzero(bad):  # a warp's own finished writes come before what it issues
            bad &= (writer // 32 != warp) | (clock == PENDING)
        if np.count_nonzero(bad):
            granule = granules[bad][0]
            writer = self.write_thread[granule]
            other = f"the write of thread {writer % (32 * self.warps)}"
            other = "a bulk copy" if writer == BULK else other
            if self.write_clock[granule] == PENDING:
                other += ", still under way,"
            other += f" by instruction {self.write_at[granule]}"
            self._fail(granule, np.broadcast_to(thread, bad.shape)[bad][0], at, what, other)

    def _after_reads(self, granules, thread, warp, lane, at):
        for reader in range(self.warps):
            clock = self.read_clock[reader].take(granules)
            bad = clock > self.seen[warp, reader]
            if not np.count_nonzero(bad):
                continue
            same = (reader == warp % self.warps) & (self.read_lane[reader].take(granules) == lane)
            bad &= ~same | (clock == PENDING)
            if bad.any():
                other = f"a read by warp {reader}"
                if (clock[bad] == PENDING).any():
                    other += ", still under way"
                first = np.broadcast_to(thread, bad.shape)[bad][0]
                self._fail(granules[bad][0], first, at, "write", other)

    def _after_fences(self, granules, warp, at):
        """Fail unless a warp has seen a fence between proxies, its own too, behind all writes."""
        seen = self.seen[warp, : self.warps].copy()
        seen[warp % self.warps] = self.clock[warp]
        clocks = self.fence_clock[:, granules]
        if not (covered := ((clocks > 0) & (clocks <= seen[:, None])).any(0)).all():
            granule = granules[~covered][0]
            other = f"a write by instruction {self.write_at[granule]} without fence.proxy.async"
            self._fail(granule, warp * 32, at, "asynchronous read", other)

    def _fail(self, granule, thread, at, what, other):
        byte = granule % self.per_block * self.granule
        block, thread = divmod(int(thread), 32 * self.warps)
        raise Fault(
            "race",
            f"{what} of shared byte {byte} by thread {thread} of block {block} of the wave "
            f"(instruction {at}) is not ordered after {other}",
        )
