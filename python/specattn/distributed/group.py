"""Collectives between the ranks that serve one text, and how a lost rank is found."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from specattn.distributed.shared_memory import SharedMemory, shared_memory

_ALIGNED = 16  # bytes; what follows in a buffer may then be of any dtype
_GRACE = 5.0  # seconds in which those that are alive answer a roll call
_KEPT = 8  # buffers

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCTIONS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "sum": (dist.ReduceOp.SUM, torch.sum),
    "min": (dist.ReduceOp.MIN, torch.amin),
    "max": (dist.ReduceOp.MAX, torch.amax),
}

Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor in an exchange."""


class RankLost(ConnectionError):
    """A rank has ended, hangs or cannot be reached; the message names it."""


class RanksDisagree(ValueError):
    """A rank was given or computes something else; the message names it."""


class Ranks:
    """A group of `torch.distributed` and what its ranks exchange.

    Parameters
    ----------
    group : ProcessGroup, optional
        By default all ranks that `torch.distributed` was started with.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    sent_bytes : dict of str to int
        What this rank has sent to others, by purpose: a gathered buffer counts ``size - 1`` times.

    Raises
    ------
    ValueError
        `torch.distributed` was not started.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        if not dist.is_initialized():
            raise ValueError(
                "several ranks need torch.distributed: start them with torchrun and call "
                "torch.distributed.init_process_group"
            )
        self.group: Any = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.sent_bytes: dict[str, int] = {}
        self._store = dist.distributed_c10d._get_default_store()
        self._buffers: dict[Any, Buffer] = {}
        cuda = dist.get_backend(self.group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"

    def buffer(self, parts: Sequence[Part], device: torch.device) -> Buffer:
        """Return memory for one exchange of tensors; it is used again for the same ones."""
        key = (device, *parts)
        if key not in self._buffers:
            if len(self._buffers) >= _KEPT:
                self._buffers.clear()
            self._buffers[key] = Buffer(self.size, parts, device)
        return self._buffers[key]

    def exchange(self, buffer: Buffer, purpose: str) -> list[torch.Tensor]:
        """All-gather ``buffer.own``: return each part of all ranks, [ranks, ...].

        The result holds until the next exchange of parts of these shapes.
        """
        self._count(purpose, buffer.bytes_own.numel() * (self.size - 1))
        self.run(lambda: self._all_gather(buffer))
        return buffer.all

    def gather(self, purpose: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return each of these tensors of all ranks, [ranks, ...]; they have the same shapes."""
        return self.exchange(self._filled(*tensors), purpose)

    def reduce(self, purpose: str, x: torch.Tensor, reduction: str) -> torch.Tensor:
        """Reduce `x` over the ranks by "sum", "min" or "max", in place: all get the same bits."""
        self._count(purpose, x.nbytes * (self.size - 1))
        self.run(lambda: self._all_reduce(x, *_REDUCTIONS[reduction]))
        return x

    def of_first(self, value: float) -> float:
        """Broadcast rank 0's value: decisions by a clock must be the same on all ranks."""
        own = torch.tensor([value], dtype=torch.float64, device=self._device)
        (found,) = self.gather("control", own)
        return found[0].item()

    def agree(self, fingerprint: int, flag: bool = False) -> bool:
        """Return rank 0's `flag`, or raise RanksDisagree unless all ranks give one `fingerprint`.

        The fingerprint, 63 bits, is of what this rank is about to do.
        """
        own = torch.tensor([fingerprint, int(flag)], device=self._device)
        (found,) = self.gather("control", own)
        (expected, flag), *others = found.tolist()
        odd = [rank for rank, (other, _) in enumerate(others, start=1) if other != expected]
        if odd:
            raise RanksDisagree(
                f"rank {_listed(odd)} goes on with other tokens than rank 0: all ranks must "
                "compute alike, on the same kind of device and with as many threads"
            )
        return bool(flag)

    def agree_on(self, facts: dict[str, Any]) -> None:
        """Raise RanksDisagree naming rank, fact and both values unless all ranks give the same."""
        found: list[Any] = [None] * self.size
        self.run(lambda: dist.all_gather_object(found, facts, group=self.group))
        for rank, other in enumerate(found):
            for name, value in found[0].items():
                if other.get(name) != value:
                    raise RanksDisagree(
                        f"rank {rank} has {name} {other.get(name)}, rank 0 has {value}"
                    )

    def run(self, collective: Callable[[], Any]) -> None:
        """Run a collective; raise RankLost where it fails, RanksDisagree where sizes differ."""
        try:
            collective()
        except RuntimeError as error:
            raise RankLost(self._roll_call(error)) from error
        except ValueError as error:
            raise RanksDisagree(str(error)) from error

    def _count(self, purpose: str, sent: int) -> None:
        self.sent_bytes[purpose] = self.sent_bytes.get(purpose, 0) + sent

    @cached_property
    def shared_memory(self) -> SharedMemory | None:
        """Memory between the ranks if all are on one machine. All must read this at once."""
        return shared_memory(self.group, self.rank, self.size)

    def _all_gather(self, buffer: Buffer) -> None:
        if (shared := self.shared_memory) is None:
            _gather(buffer.bytes_all, buffer.bytes_own, group=self.group)
        else:
            shared.all_gather(*buffer.words)

    def _all_reduce(self, x: torch.Tensor, op: Any, function: Callable[..., Any]) -> None:
        if self.shared_memory is None:
            dist.all_reduce(x, op=op, group=self.group)
            return
        buffer = self._filled(x)
        self._all_gather(buffer)
        function(buffer.all[0], 0, out=x)

    def _filled(self, *tensors: torch.Tensor) -> Buffer:
        parts = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        buffer = self.buffer(parts, tensors[0].device)
        for own, tensor in zip(buffer.own, tensors, strict=True):
            own.copy_(tensor)
        return buffer

    def _roll_call(self, error: Exception) -> str:
        """Return a message that names the ranks that do not answer.

        A rank that sees a collective fail sets its key in the store. Others see a failure when this
        rank closes its connections, so all that are alive have answered after a few seconds.
        """
        # Without the place in gloo's source, and its advice.
        reason = re.sub(r"^\[\S+\] ", "", str(error)).splitlines()[0].partition(". ")[0]
        try:
            keys = [f"specattn/alive/{rank}" for rank in range(self.size)]
            self._store.set(keys[self.rank], "yes")
            if (shared := vars(self).pop("shared_memory", None)) is not None:
                shared.close()
            # Nobody may hold the group any more, or its connections stay open.
            traceback.clear_frames(error.__traceback__)
            group, self.group = self.group, None
            dist.destroy_process_group(group)
            del group
            missing, end = list(range(self.size)), time.monotonic() + _GRACE
            while missing and time.monotonic() < end:
                time.sleep(0.05)
                missing = [rank for rank in missing if not self._store.check([keys[rank]])]
        except RuntimeError:
            return f"rank 0, which keeps the group's store, does not answer ({reason})"
        if not missing:
            return f"an exchange between the ranks failed, though all answer ({reason})"
        return f"rank {_listed(missing)} of {self.size} does not answer ({reason})"


class ContextParallel(Ranks):
    """A group of ranks that hold one cache together, each a share of every text's tokens.

    Every rank of the group makes one, with the same arguments, and gives it to the same call of
    `specattn.decoding.generate`.

    Parameters
    ----------
    group : ProcessGroup, optional
        By default all ranks that `torch.distributed` was started with. With a model that is divided
        too (`TensorParallel`), those that hold the same part of it.
    block_size : int
        Tokens are sharded in blocks of so many. Methods that select pages of the cache (`Quest`)
        need a multiple of a page.

    Attributes
    ----------
    rank, size, sent_bytes
        As for `Ranks`.

    Raises
    ------
    ValueError
        `torch.distributed` was not started, or `block_size` is not positive.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, block_size: int = 64):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        super().__init__(group)
        self.block_size = block_size


class Buffer:
    """Tensors side by side in one buffer: this rank's, `own`, and those of all, `all` [ranks, ...].

    `own` is written before an exchange and `all` read after it; `words` are both as int32, [n] and
    [ranks, n].
    """

    def __init__(self, ranks: int, parts: Sequence[Part], device: torch.device):
        ends, total = [], 0
        for shape, dtype in parts:
            first, total = total, total + prod(shape) * dtype.itemsize
            ends.append((first, total))
            total += -total % _ALIGNED
        self.bytes_own = torch.empty(total, dtype=torch.uint8, device=device)
        self.bytes_all = torch.empty(ranks * total, dtype=torch.uint8, device=device)
        rows = self.bytes_all.view(ranks, total)
        self.words = self.bytes_own.view(torch.int32), rows.view(torch.int32)
        placed = list(zip(parts, ends, strict=True))
        self.own = [
            self.bytes_own[a:b].view(dtype).view(shape) for (shape, dtype), (a, b) in placed
        ]
        self.all = [
            rows[:, a:b].view(dtype).unflatten(1, shape) if shape else rows[:, a:b].view(dtype)
            for (shape, dtype), (a, b) in placed
        ]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
