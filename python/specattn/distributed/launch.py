"""Ranks that ``torchrun`` has started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from specattn.distributed.group import ContextParallel

_STARTED_BY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def torchrun_ranks(count: int, *, timeout: float, on_gpu: bool) -> Iterator[ContextParallel]:
    """Join the ranks that torchrun has started, and leave them at the end.

    Parameters
    ----------
    count : int
        How many there must be.
    timeout : float
        Seconds after which a rank that does not take part in an exchange is lost.
    on_gpu : bool
        Whether each rank computes on a GPU, that of its local rank.

    Raises
    ------
    ValueError
        This process was not started by torchrun, or there are more or fewer ranks.
    RankLost
        Not all have come within the timeout.
    """
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
        yield ContextParallel()
    finally:
        if dist.is_initialized():  # not after a rank was lost
            dist.destroy_process_group()
