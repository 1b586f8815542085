"""What the ranks of one machine exchange through: memory that they share (csrc/cpu/exchange.h)."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import weakref
from typing import Any

import torch
import torch.distributed as dist

_FOLDER = "/dev/shm"  # noqa: S108 - memory, which no other folder is
_PLACE = 1 << 18  # bytes; what is larger is exchanged in pieces
_SEAT = 64  # bytes


class SharedMemory:
    """One rank's view of memory that it shares with others, and its lock on its seat there.

    Parameters
    ----------
    path : str
        A file of `_FOLDER` in the size for so many ranks.
    rank, ranks : int
    timeout : float
        Seconds after which a rank that does not take part in an exchange is lost.

    Raises
    ------
    OSError
        There is no such file here.
    """

    def __init__(self, path: str, rank: int, ranks: int, timeout: float):
        import fcntl

        import specattn._cpu as _cpu

        self.rank, self.ranks, self.timeout = rank, ranks, timeout
        self._file = os.open(path, os.O_RDWR)
        self.close = weakref.finalize(self, os.close, self._file)  # the others notice
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self.memory = torch.frombuffer(mmap.mmap(self._file, 0), dtype=torch.int32)
        self.kernel = _cpu.all_gather

    @property
    def seat(self) -> tuple[Any, ...]:
        """The first arguments of `kernel`; what is exchanged follows."""
        return self.memory, self._file, self.rank, self.timeout

    def all_gather(self, own: torch.Tensor, out: torch.Tensor) -> None:
        """Write what all ranks give, int32 [n], to `out` [ranks, n].

        Raises
        ------
        RuntimeError
            A rank has left, or does not come within the timeout.
        ValueError
            A rank gives more or less.
        """
        self.kernel(*self.seat, own, out, 1)

    def sees_all(self) -> bool:
        """Whether all others have locked their seats, so that it will be seen when one ends."""
        import fcntl

        for other in set(range(self.ranks)) - {self.rank}:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
            except OSError:
                continue
            return False
        return True


def shared_memory(group: Any, rank: int, ranks: int) -> SharedMemory | None:
    """Return memory that all ranks of a group have in common; None where they have none.

    They have where gloo serves them, all run on one machine under Linux and none sees another
    ``/dev/shm``. Every rank must call it.
    """
    if dist.get_backend(group) != "gloo":
        return None
    path = None
    try:
        path = _created(ranks) if rank == 0 else None
        path_of_first = _told(group, ranks, path)[0]
        timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        memory = _joined(path_of_first, rank, ranks, timeout)
        if not all(_told(group, ranks, memory is not None)):
            return None
        return memory if all(_told(group, ranks, memory is None or memory.sees_all())) else None
    finally:
        if path is not None:
            os.unlink(path)


def _told(group: Any, ranks: int, value: Any) -> list[Any]:
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, value, group=group)
    return found


def _created(ranks: int) -> str | None:
    if not (sys.platform == "linux" and os.path.isdir(_FOLDER)):
        return None
    try:
        file, path = tempfile.mkstemp(prefix="specattn-", dir=_FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, ranks * (_SEAT + 2 * _PLACE))
    except OSError:  # no room
        os.unlink(path)
        return None
    finally:
        os.close(file)
    return path


def _joined(path: str | None, rank: int, ranks: int, timeout: float) -> SharedMemory | None:
    if path is None:
        return None
    try:
        return SharedMemory(path, rank, ranks, timeout)
    except (OSError, ImportError):
        return None
