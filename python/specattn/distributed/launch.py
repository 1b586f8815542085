"""Joining the ranks that ``torchrun`` has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from specattn.distributed.group import ContextParallel, Ranks

_STARTED_BY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def refuse_ranks(command: str) -> None:
    """Raise ValueError where torchrun has started several processes of a single-rank `command`."""
    if (count := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(f"{command} is for one rank, but torchrun has started {count}")


class Started(NamedTuple):
    """The ranks that this process is one of."""

    ranks: Ranks  # all of them
    context: ContextParallel | None  # those with the same part of the model
    parts: int  # into which the model is divided


@contextmanager
def torchrun_ranks(shares: int, parts: int, *, timeout: float, on_gpu: bool) -> Iterator[Started]:
    """Join the ranks that torchrun has started, and leave them at the end.

    There must be ``shares * parts`` ranks, shares of the cache and parts of the model; consecutive
    ranks hold the parts of one model. A rank that takes longer than `timeout` seconds is lost
    (RankLost). With `on_gpu`, each rank computes on the GPU of its local rank. Raises ValueError
    where this process was not started by torchrun, or the number of ranks differs.
    """
    count = shares * parts
    if any(name not in os.environ for name in _STARTED_BY):
        raise ValueError(
            f"{count} ranks need {count} processes: "
            f"torchrun --nproc-per-node {count} -m specattn.cli generate ..."
        )
    if (started := int(os.environ["WORLD_SIZE"])) != count:
        raise ValueError(f"expected {count} ranks, but torchrun has started {started}")
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout))
    try:
        yield Started(Ranks(), _context(shares, parts, "cuda" if on_gpu else "cpu"), parts)
    finally:
        if dist.is_initialized():  # not after a rank was lost
            dist.destroy_process_group()


def _context(shares: int, parts: int, device: str) -> ContextParallel | None:
    if shares == 1 and parts > 1:
        return None
    if parts == 1:
        return ContextParallel()
    mesh = dist.init_device_mesh(device, (shares, parts), mesh_dim_names=("context", "tensor"))
    return ContextParallel(mesh["context"].get_group())
