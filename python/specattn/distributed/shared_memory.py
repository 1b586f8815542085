"""All-gather between the ranks of one machine through shared memory (csrc/cpu/exchange.h)."""

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
    """One rank's mapping of memory that it shares with others, and its lock on its seat there.

    `path` is a file of `_FOLDER`, sized for all ranks (OSError where it is missing); a rank that
    takes longer than `timeout` seconds in an exchange is lost.
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

        Raises RuntimeError where a rank has left or times out, ValueError where sizes differ.
        """
        self.kernel(*self.seat, own, out, 1)

    def sees_all(self) -> bool:
        """Whether all others hold the locks on their seats, so that the end of one will be seen."""
        import fcntl

        for other in set(range(self.ranks)) - {self.rank}:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
            except OSError:
                continue
            return False
        return True


def shared_memory(group: Any, rank: int, ranks: int) -> SharedMemory | None:
    """Return memory that all ranks of a group share; None where they have none. Collective.

    There is some where gloo connects them, all run on one machine under Linux and all see the same
    ``/dev/shm``.
    """
    if dist.get_backend(group) != "gloo":
        return None
    path = None
    try:
        path = _create_file(ranks) if rank == 0 else None
        first_path = _gather_objects(group, ranks, path)[0]
        timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        memory = _join(first_path, rank, ranks, timeout)
        if not all(_gather_objects(group, ranks, memory is not None)):
            return None
        seen = memory is None or memory.sees_all()
        return memory if all(_gather_objects(group, ranks, seen)) else None
    finally:
        if path is not None:
            os.unlink(path)


def _gather_objects(group: Any, ranks: int, value: Any) -> list[Any]:
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, value, group=group)
    return found


def _create_file(ranks: int) -> str | None:
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


def _join(path: str | None, rank: int, ranks: int, timeout: float) -> SharedMemory | None:
    if path is None:
        return None
    try:
        return SharedMemory(path, rank, ranks, timeout)
    except (OSError, ImportError):
        return None
