"""Layers with a state in place of keys: which modules they are, and their weights by role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from specattn.blocks import Convolution, Gates, Norm, Projection, Unrecognised
from specattn.decoding.model.weights import Reordered, read_dense, read_projection, reordered


@dataclass(frozen=True)
class GatedDelta:
    """The weights of a gated delta layer (arXiv 2412.06464), as Qwen3-Next and others have it.

    Queries, keys and values are `mixed` and convolved; `b` and `a` make the gates; what the state
    says is normed by head, times the SiLU of `z`.
    """

    mixed: tuple[Projection, ...]
    convolution: Convolution
    k_heads: int
    z: Projection
    b: Projection
    a: Projection
    gates: Gates
    norm: Norm
    out: Projection


def state_modules(model: PreTrainedModel) -> dict[int, Any]:
    """Return the layers' modules that keep a state, by the layer's number."""
    layers = getattr(model.base_model, "layers", ())[: model.config.num_hidden_layers]
    found = ((n, getattr(layer, "linear_attn", None)) for n, layer in enumerate(layers))
    return {n: module for n, module in found if module is not None}


def state_layers(model: PreTrainedModel) -> dict[int, GatedDelta]:
    """Return the weights of all layers that keep a state; raises `Unrecognised`."""
    order, modules = reordered(model), state_modules(model).items()
    return {n: gated_delta_layer(module, f"layer {n}", order) for n, module in modules}


def gated_delta_layer(module: Any, where: str, order: Reordered) -> GatedDelta:
    """Return the weights of one layer, its own tensors wherever they can be."""
    names = {name for name, _ in module.named_children()}
    heads, values = module.num_k_heads, module.num_v_heads
    of_one = values // heads
    widths = module.head_k_dim, module.head_k_dim, of_one * module.head_v_dim

    def read(*projections: str) -> tuple[Projection, ...]:
        return tuple(read_projection(getattr(module, name), where) for name in projections)

    if names == {"conv1d", "in_proj_qkvz", "in_proj_ba", "norm", "out_proj"}:  # heads side by side
        *mixed, z = order.parts(module.in_proj_qkvz, heads, (*widths, widths[2]), where)
        b, a = order.parts(module.in_proj_ba, heads, (of_one, of_one), where)
        norm, out = module.norm, module.out_proj
    elif names == {*(f"in_proj_{x}" for x in ("qkv", "z", "b", "a")), "conv1d", "norm", "out_proj"}:
        (*mixed, z, b, a) = read(*(f"in_proj_{x}" for x in ("qkv", "z", "b", "a")))
        norm, out = module.norm, module.out_proj
    elif names == {*(f"{x}_proj" for x in "qkvgbao"), "conv1d", "o_norm"}:
        (*mixed, z, b, a) = read(*(f"{x}_proj" for x in "qkvgba"))
        norm, out = module.o_norm, module.o_proj
    else:
        raise Unrecognised(f"{where} keeps a state, and is made of {', '.join(sorted(names))}")
    if getattr(module, "activation", None) != "silu" or getattr(norm, "activation", None) != "silu":
        raise Unrecognised(f"{where} keeps a state, and has another activation than SiLU")
    conv = module.conv1d
    bias = None if conv.bias is None else read_dense(conv.bias, where)
    most_beta = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0
    rate, a_bias = -module.A_log.detach().float().exp(), module.dt_bias.detach().float()
    return GatedDelta(
        mixed=tuple(mixed),
        convolution=Convolution(read_dense(conv.weight, where).squeeze(1), bias),
        k_heads=heads,
        z=z,
        b=b,
        a=a,
        gates=Gates(rate, a_bias, most_beta),
        norm=Norm(norm.weight.detach(), float(norm.variance_epsilon)),
        out=read_projection(out, where),
    )
