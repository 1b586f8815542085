"""Plans launches of `select_topk`."""

from __future__ import annotations

import struct

import torch

from ..backend import NotServed
from .build import Device, Program
from .launch import Plan

# As csrc/cuda/select_topk.cu has them.
_STRUCT = struct.Struct("<4Qd4q9i4x")
_THREADS = 512
_STATIC = 4096  # bytes at most of a block's static shared memory


def select_topk(
    scores, cache_seqlens, ratio, budget, min_tokens, keep_first, keep_last, indices, index_lengths,
    *, device: Device,
) -> Plan:  # fmt: skip
    """Plan `select_topk`."""
    if scores.dtype != torch.float32:
        raise NotServed(f"{scores.dtype}")
    per_head = scores.dim() == 3
    heads = scores.shape[1] if per_head else 1
    capacity = scores.shape[-1]
    held = 4 * capacity + _STATIC <= device.shared_per_block
    strides = [*_two(scores, per_head), *_two(indices, per_head)]
    lengths = [cache_seqlens.stride(0), *_two(index_lengths, per_head)]
    least = max(min_tokens, keep_first + keep_last)
    wanted = 0 if budget is None else min(budget, capacity)
    sizes = (heads, indices.shape[-1], wanted, least, keep_first, keep_last)
    return Plan(
        Program("select_topk", (("HELD", int(held)),)),
        (len(scores) * heads, 1, 1),
        _THREADS,
        4 * capacity if held else 0,
        _STRUCT.pack(*[0] * 4, ratio or 0.0, *strides, *lengths, *sizes),
        ((0, 0), (1, 1), (2, 7), (3, 8)),
        (),
    )


def _two(tensor: torch.Tensor, per_head: bool) -> tuple[int, int]:
    """Return the strides over requests and heads."""
    return tensor.stride(0), tensor.stride(1) if per_head else 0
