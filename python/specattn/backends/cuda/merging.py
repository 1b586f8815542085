"""Plans launches of `merge`: merge_state and merge_states."""

from __future__ import annotations

import struct

import torch

from ..backend import NotServed
from .build import Device, Program
from .launch import Plan

# As csrc/cuda/merge.cu has them.
_STRUCT = struct.Struct("<6Q20q5i4x")
_WARPS = 4  # rows of a block
_ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def merge_states(outs, lses, out, lse, *, device: Device) -> Plan:
    """Plan `merge_states`."""
    return _plan((outs, 0), (lses, 1), None, None, (out, 2), (lse, 3))


def merge_state(out_a, lse_a, out_b, lse_b, out, lse, *, device: Device) -> Plan:
    """Plan `merge_state`."""
    first = (out_a[None], 0), (lse_a[None], 1)
    return _plan(*first, (out_b, 2), (lse_b, 3), (out, 4), (lse, 5))


def _plan(outs, lses, out_b, lse_b, out, lse) -> Plan:
    """Plan a merge of tensors, each with the number of its argument."""
    given = [x for x in (outs, lses, out_b, lse_b, out, lse) if x is not None]
    places = [
        place for place, x in enumerate((outs, lses, out_b, lse_b, out, lse)) if x is not None
    ]
    whole = [x for x in (outs, out_b, out) if x is not None]
    for tensor, _ in whole:
        if any(stride * tensor.element_size() % 16 for stride in tensor.stride()[:-1]):
            raise NotServed("states with strides that are no multiples of 16 bytes")
    n, B, T, heads, D = outs[0].shape
    strides = [*outs[0].stride()[:4], *lses[0].stride()]
    strides += [*out_b[0].stride()[:3], *lse_b[0].stride()] if out_b else [0] * 6
    strides += [*out[0].stride()[:3], *lse[0].stride()]
    rows = B * T * heads
    program = Program("merge", (("ELEMENT", _ELEMENTS[outs[0].dtype]),))
    return Plan(
        program,
        (-(-rows // _WARPS), 1, 1),
        32 * _WARPS,
        0,
        _STRUCT.pack(*[0] * 6, *strides, n, rows, T, heads, D),
        tuple(zip(places, (argument for _, argument in given), strict=True)),
        tuple(argument for _, argument in whole),
    )
