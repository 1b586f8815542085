"""What a launch did: instructions by class, bytes and sectors, bank conflicts, barriers."""

import functools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

SECTOR = 32
BANKS = 32


@dataclass
class Counts:
    """Counts of a launch. Instructions are counted once per warp, barriers once per block.

    ``sectors``: 32-byte sectors that global accesses touch, per warp and instruction. A request of
    shared memory is one warp's instruction; ``conflicts`` are the extra passes that it takes
    because lanes want different words of one bank. ``overwritten`` counts values that another lane
    overwrote in the same instruction with a different one.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    sectors_read: int = 0
    sectors_written: int = 0
    shared_requests: int = 0
    shared_conflicts: int = 0
    overwritten: int = 0
    barriers: int = 0
    blocks: int = 0
    instructions: Counter = field(default_factory=Counter)

    @property
    def total_instructions(self):
        """Instructions of all classes."""
        return sum(self.instructions.values())

    def __add__(self, other):
        """Add up two launches."""
        return Counts(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    def times(self, number):
        """Return the counts of so many blocks like these."""
        plain = {
            name: number * value for name, value in vars(self).items() if name != "instructions"
        }
        repeated = Counter({kind: number * n for kind, n in self.instructions.items()})
        return Counts(**plain, instructions=repeated)

    def global_access(self, address, size, active, *, write=False):
        """Count an access of ``size`` bytes per thread at ``address`` [threads]."""
        count = len(address) if active is None else int(active.sum())
        if active is not None:
            address = np.where(active, address, -1)
        sectors = _distinct(address.reshape(-1, 32) // SECTOR)
        if write:
            self.bytes_written += count * size
            self.sectors_written += sectors
        else:
            self.bytes_read += count * size
            self.sectors_read += sectors

    def bulk_access(self, address, size, *, write):
        """Count a bulk copy's side in global memory."""
        sectors = len(np.unique(address // SECTOR))
        if write:
            self.bytes_written += len(address) * size
            self.sectors_written += sectors
        else:
            self.bytes_read += len(address) * size
            self.sectors_read += sectors

    def shared_access(self, address, size, active):
        """Count the passes of one instruction; ``address`` [threads] within the window."""
        warps = address.reshape(-1, 32)
        idle = np.zeros(warps.shape, bool) if active is None else ~active.reshape(-1, 32)
        parts = max(size // 4, 1)  # 8 and 16 bytes per lane go half or quarter warp by quarter warp
        lanes = 32 // parts
        words = (warps // 4).reshape(-1, parts, lanes)[..., None] + np.arange(parts)
        idle = np.repeat(idle.reshape(-1, lanes), parts, axis=1)
        words = words.reshape(-1, lanes * parts)
        order = np.argsort(np.where(idle, -1, words), axis=1)
        words = np.take_along_axis(np.where(idle, -1, words), order, 1)
        new = np.ones(words.shape, bool)
        new[:, 1:] = words[:, 1:] != words[:, :-1]
        new &= words >= 0
        rows = np.broadcast_to(np.arange(len(words))[:, None], words.shape)[new]
        per_bank = np.bincount(rows * BANKS + words[new] % BANKS, minlength=len(words) * BANKS)
        passes = per_bank.reshape(-1, BANKS).max(1)
        self.shared_requests += int((~idle).reshape(len(warps), -1).any(1).sum())
        self.shared_conflicts += int(np.maximum(passes - 1, 0).sum())


def _distinct(rows):
    """Return how many different values rows hold, each row on its own, without negative ones."""
    rows = np.sort(rows, axis=1)
    new = (rows[:, 1:] != rows[:, :-1]) & (rows[:, 1:] >= 0)
    return int(new.sum() + (rows[:, 0] >= 0).sum())


CLASSES = {
    "matrix": ("mma", "wgmma.mma_async"),
    "matrix load and store": ("ldmatrix", "stmatrix"),
    "asynchronous copy": ("cp.async",),
    "global": ("ld.global", "st.global", "atom", "red"),
    "shared": ("ld.shared", "st.shared"),
    "other memory": ("ld", "st"),
    "exchange": ("shfl", "redux", "vote", "match"),
    "synchronisation": ("bar", "barrier", "mbarrier", "fence", "membar", "wgmma", "griddepcontrol"),
    "control": ("bra", "ret", "exit"),
    "special function": ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos", "div"),
    "float": ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"),
}


@functools.cache
def instruction_class(name):
    """Return the class of a mnemonic: by how it begins, else by its type, else "integer"."""
    for kind, starts in CLASSES.items():
        if kind == "float":
            continue
        if any(name == start or name.startswith((start + ".", start + "::")) for start in starts):
            return kind
    return "float" if name.rsplit(".", 1)[-1] in CLASSES["float"] else "integer"
