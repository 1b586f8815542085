"""Static launch configurations: how a problem is cut into tiles, per architecture.

Nothing is timed or tuned at run time, so a call never stalls and the same call always runs the
same code.
"""

from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

_forced: dict = {}


class AttentionConfig(NamedTuple):
    """One row: tile sizes, warps and pipeline depth, and how many programs one SM holds."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


@lru_cache(None)
def architecture(device: torch.device) -> str:
    return "interpreter"


@lru_cache(None)
def _multiprocessors(device: torch.device) -> int:
    """Return the number of SMs; the interpreter counts as a few."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def attention_config(device, dtype, rows, D):
    return AttentionConfig(
        _forced.get("block_m", max(16, min(64, triton.next_power_of_2(rows)))),
        _forced.get("block_n", 64),
        max(16, triton.next_power_of_2(D)),
        4,
        3,
        2,
    )


def split_size(device, config, programs, span):
    return _forced.get("split_size", 256)


def combine_blocks(device, num_states, D):
    block_d = max(16, triton.next_power_of_2(D))
    return 32, min(triton.next_power_of_2(num_states), 16), block_d, 1


@contextmanager
def forced(**values):
    previous = dict(_forced)
    _forced.update(values)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(previous)


class ImportanceConfig(NamedTuple):
    block_n: int
    block_d: int
    num_warps: int


def importance_config(device, dtype, D):
    return ImportanceConfig(64, max(16, triton.next_power_of_2(D)), 4)
