"""Plans launches of `merge`: merge_state and merge_states."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from ...call_forms import NotServed
from .build import Device, Program
from .launch import Plan

# As csrc/cuda/merge.cu has them.
_STRUCT = struct.Struct("<6Q20q5i4x")
_WARPS = 4  # rows of a block
_ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def merge_states(outs, lses, out, lse, *, device: Device) -> Plan:
    """Plan `merge_states`."""
    return _plan((outs, lses, None, None, out, lse), (0, 1, 4, 5))


def merge_state(out_a, lse_a, out_b, lse_b, out, lse, *, device: Device) -> Plan:
    """Plan `merge_state`."""
    return _plan((out_a[None], lse_a[None], out_b, lse_b, out, lse), range(6))


def _plan(tensors, places: Sequence[int]) -> Plan:
    """Plan a merge of the kernel's tensors; arguments are those at ``places``."""
    outs, lses, out_b, lse_b, out, lse = tensors
    wide = [(i, tensors[place]) for i, place in enumerate(places) if place % 2 == 0]
    for _, tensor in wide:
        if any(stride * tensor.element_size() % 16 for stride in tensor.stride()[:-1]):
            raise NotServed("states with strides that are no multiples of 16 bytes")
    n, B, T, heads, D = outs.shape
    strides = [*outs.stride()[:4], *lses.stride()]
    strides += [0] * 6 if out_b is None else [*out_b.stride()[:3], *lse_b.stride()]
    strides += [*out.stride()[:3], *lse.stride()]
    rows = B * T * heads
    return Plan(
        Program("merge", (("ELEMENT", _ELEMENTS[outs.dtype]),)),
        (-(-rows // _WARPS), 1, 1),
        32 * _WARPS,
        0,
        _STRUCT.pack(*[0] * 6, *strides, n, rows, T, heads, D),
        tuple((place, argument) for argument, place in enumerate(places)),
        tuple(argument for argument, _ in wide),
    )
