"""Layers with a state in place of keys: their equations."""

from __future__ import annotations

import torch

from specattn.blocks import Ops
from specattn.decoding.model.recurrent import GatedDelta
from specattn.states import StateRows


def gated_delta(ops: Ops, weights: GatedDelta, x: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Return what a gated delta layer says to its last product: [B, T, Hv * Dv] of x [B, T, H]."""
    room = {"keep": True} if rows.room is None else {"into": rows.room[0]}
    mixed = ops.linear(x, *weights.mixed, **room)
    products = ops.linear(x, weights.z, weights.b, weights.a)
    z, b, a = products.split([len(one.weight) for one in (weights.z, weights.b, weights.a)], -1)
    g, beta = ops.gates(b, a, weights.gates)
    out = ops.gated_delta(mixed, weights.convolution, g, beta, weights.k_heads, rows)
    return ops.gate(ops.norm(out, weights.norm).flatten(2), z, "silu")
