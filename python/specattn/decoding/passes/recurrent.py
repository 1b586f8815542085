"""Layers with a state in place of keys: their equations, and the model's modules that run them."""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from specattn.blocks import Ops
from specattn.decoding.model.recurrent import GatedDelta, state_modules
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


def attach_states(model: PreTrainedModel) -> None:
    """Let passes that carry a plan run the layers with a state through it; idempotent.

    As `attach` does for attention: a call without a plan does what the module does by itself.
    ValueError: something else has replaced a module's ``forward``.
    """
    for n, module in state_modules(model).items():
        now = getattr(vars(module).get("forward"), "__func__", None)
        if "forward" in vars(module) and now not in (forward, type(module).forward):
            raise ValueError(f"layer {n} keeps a state, and its forward was replaced")
        if now is not forward:  # of an unpickled model it is the class's own
            module.forward = MethodType(forward, module)


def forward(
    module: Any, hidden_states: torch.Tensor, *, specattn_pass: Any = None, **options: Any
) -> torch.Tensor:
    """Run a layer's module, or what a pass or a probe has in its place."""
    if specattn_pass is not None:
        return cast(torch.Tensor, specattn_pass.recur(module, hidden_states, options))
    return cast(torch.Tensor, type(module).forward(module, hidden_states, **options))
