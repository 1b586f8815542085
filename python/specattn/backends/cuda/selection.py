"""Plans launches of `select_topk`."""

from __future__ import annotations

import struct

import torch

from ...call_forms import NotServed
from .build import Device, Program
from .launch import Plan

# As csrc/cuda/select_topk.cu has them.
_STRUCT = struct.Struct("<6Qd4q10i")
_THREADS = 512
_DIGITS, _STEPS = 2048, 3
_ALONE = 32768  # scores of a row that one block takes on
_SHARE = 8192  # of a longer one, at least
_WORKSPACE = 64 << 20  # bytes that histograms may take


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
    rows, shares = len(scores) * heads, 1
    if capacity > _ALONE:
        most = min(_WORKSPACE // (4 * _DIGITS), 2 * device.multiprocessors) // rows
        shares = max(1, min(-(-capacity // _SHARE), most))
    share = -(-capacity // shares)
    strides = [*_two(scores, per_head), *_two(indices, per_head)]
    lengths = [cache_seqlens.stride(0), *_two(index_lengths, per_head)]
    least = max(min_tokens, keep_first + keep_last)
    wanted = 0 if budget is None else min(budget, capacity)
    sizes = (indices.shape[-1], wanted, least, keep_first, keep_last, share, 0)
    return Plan(
        Program("select_topk", ()),
        (heads, shares, len(scores)),
        _THREADS,
        0,
        _STRUCT.pack(*[0] * 6, ratio or 0.0, *strides, *lengths, *sizes),
        ((0, 0), (1, 1), (2, 7), (3, 8)),
        (),
        (4, 4 * rows * ((_DIGITS + 2) * shares + 3)) if shares > 1 else None,
        (5, rows) if shares > 1 else None,
        steps=_STEPS + 1 if shares > 1 else 1,
    )


def _two(tensor: torch.Tensor, per_head: bool) -> tuple[int, int]:
    """Return the strides over requests and heads."""
    return tensor.stride(0), tensor.stride(1) if per_head else 0
