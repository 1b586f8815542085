"""Byte-addressed memories with a shadow: which bytes exist, and which bits have been written.

A `Memory` is one buffer, viewed as words of the size of each access. `defined` is a second buffer
of the same shape whose bits are 1 where the data's bit has a value, so that a load moves both in
the same way. Global memory (`GlobalMemory`) holds whole allocations with red zones between them.
"""

import numpy as np

from .faults import Fault

# complex128 is the one 16-byte type that numpy moves quickly; its bits are only ever copied.
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
GLOBAL_BASE = 1 << 36
RED_ZONE = 512
ALIGNMENT = 256
POISON = 0xFFC5  # a NaN in bfloat16, float16 and, twice, in float32; an odd integer


def poison(count):
    """Return bytes that nobody has written."""
    return np.full(-(-count // 2), POISON, np.uint16).view(np.uint8)[:count]


class Memory:
    """``count`` equal windows of ``size`` bytes in one buffer; addresses are relative to a window.

    Shared memory has a window per block, local memory one per thread, global memory a single one.
    """

    def __init__(self, name, size, count=1, base=0):
        self.name, self.base = name, base
        self.size = size
        self.stride = -(-size // 16) * 16
        total = max(self.stride * count, 16)
        self.data = poison(total)
        self.defined = np.zeros(total, np.uint8)
        self._data = {n: self.data.view(word) for n, word in WORDS.items()}
        self._defined = {n: self.defined.view(word) for n, word in WORDS.items()}

    def forget(self):
        """Return to the state in which nothing has been written."""
        self.data[:] = poison(len(self.data))
        self.defined[:] = 0

    def locate(self, address, size, active, window=0):
        """Return the index of each access in words of ``size`` bytes; 0 where not ``active``.

        ``address`` is int64 of any shape; ``active`` (None: all) and ``window`` broadcast to it.
        """
        offset = address - self.base
        bad = (offset < 0) | (offset > self.size - size)
        self._check(bad, active, address, size, "bounds", "is out of bounds")
        bad = (offset & (size - 1)) != 0
        self._check(bad, active, address, size, "alignment", "is misaligned")
        index = (offset + window * self.stride) // size
        if active is not None:
            index = np.where(active, index, 0)
        return self._inside(index, size, active, address)

    def _inside(self, index, size, active, address):
        return index

    def _check(self, bad, active, address, size, kind, verdict):
        if active is not None:
            bad = bad & active
        if np.count_nonzero(bad):
            first = int(np.broadcast_to(address, bad.shape)[bad][0])
            where = f"{self.name} access of {size} bytes at {first:#x}"
            raise Fault(kind, f"{where} {verdict}{self.nearby(first)}")

    def nearby(self, address):
        """Say where an address lies, for messages."""
        return f" of {self.size} bytes" if self.name != "global" else ""

    def load(self, index, size):
        """Return (words, undefined bits or None) at indices from `locate`."""
        words = self._data[size].take(index)
        defined = self._defined[size].take(index)
        if size == 16:
            undefined = ~defined.view(np.uint64)
            return words, undefined.view(np.complex128) if np.count_nonzero(undefined) else None
        undefined = ~defined
        return words, undefined if np.count_nonzero(undefined) else None

    def holds(self, index, size, words):
        """Return which accesses would write what is there already."""
        return _equal(self._data[size][index], words)

    def store(self, index, size, words, undefined):
        """Write words and their shadow; where two differ for one place, the last one stays."""
        self._data[size][index] = words
        if undefined is None:
            full = np.full(size, 0xFF, np.uint8).view(WORDS[size])[0]
            self._defined[size][index] = full
        elif size == 16:
            self._defined[16][index] = (~undefined.view(np.uint64)).view(np.complex128)
        else:
            self._defined[size][index] = ~undefined


def _equal(a, b):
    if a.dtype == np.complex128:  # bits, not numbers
        return (a.view(np.uint64) == b.view(np.uint64)).reshape(-1, 2).all(1)
    return a == b


class GlobalMemory(Memory):
    """Allocations between red zones; `read` copies one out.

    Of an allocation with ``runs`` {key: ((offset in bytes, length), ...)} only these exist, and its
    data are theirs, one after the other; so strides may be as far as on a GPU.
    """

    def __init__(self, arrays, runs=None):
        """Take {key: (uint8 data, uint8 defined or None)}; None means that all of it is defined."""
        self.where, self.runs, at = {}, None, ALIGNMENT
        for key, (data, _) in sorted(arrays.items(), key=lambda item: item[0] in (runs or {})):
            self.where[key] = at, len(data)
            at += -(-(len(data) + RED_ZONE) // ALIGNMENT) * ALIGNMENT
        super().__init__("global", at, base=GLOBAL_BASE)
        self.origin = {key: at for key, (at, _) in self.where.items()}
        if runs:
            self._spread(runs)
        allowed = np.zeros(self.stride, bool)
        for key, (data, defined) in arrays.items():
            start, length = self.where[key]
            allowed[start : start + length] = True
            self.data[start : start + length] = data
            self.defined[start : start + length] = 0xFF if defined is None else defined
        self._allowed = {n: allowed.reshape(-1, n).all(1) for n in WORDS}

    def _spread(self, runs):
        """Give allocations with runs addresses behind all others."""
        at = self.size
        pieces = [(0, 0, min(self.where[key][0] for key in runs))]  # offset, place, length
        for key, places in runs.items():
            self.origin[key], place = at, self.where[key][0]
            for offset, length in places:
                pieces.append((at + offset, place, length))
                place += length
            at += -(-(offset + length + RED_ZONE) // ALIGNMENT) * ALIGNMENT
        self.runs = np.array(sorted(pieces)).T
        self.size = at

    def locate(self, address, size, active, window=0):
        """Return the index of each access, in what exists of the allocations."""
        if self.runs is None:
            return super().locate(address, size, active, window)
        offsets, places, lengths = self.runs
        run = np.maximum(np.searchsorted(offsets, address - self.base, "right") - 1, 0)
        inside = address - self.base - offsets[run]
        bad = (inside < 0) | (inside > lengths[run] - size)
        self._check(bad, active, address, size, "bounds", "is out of bounds")
        packed = self.base + places[run] + np.where(bad, 0, inside)
        return super().locate(packed, size, active, window)

    def address_of(self, place):
        """Return the address of the byte at a place of the buffer."""
        if self.runs is not None:
            offsets, places, lengths = self.runs
            inside = (places <= place) & (place < places + lengths)
            place += int((offsets - places)[inside].sum())
        return self.base + place

    def address(self, key):
        """Return the address of an allocation's first byte."""
        return self.base + self.origin[key]

    def read(self, key):
        """Return views of an allocation's (data, defined)."""
        start, length = self.where[key]
        return self.data[start : start + length], self.defined[start : start + length]

    def _inside(self, index, size, active, address):
        outside = ~self._allowed[size].take(index)
        self._check(outside, active, address, size, "bounds", "is out of bounds")
        return index

    def nearby(self, address):
        """Name the allocation at or before an address."""
        offset = address - self.base
        before = [(start, key) for key, start in self.origin.items() if start <= offset]
        if not before:
            return ", before all allocations"
        start, key = max(before, key=lambda x: x[0])
        return f", {offset - start} bytes into {key!r} of {self.where[key][1]} bytes"
