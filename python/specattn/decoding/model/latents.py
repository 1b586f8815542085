"""Layers with one latent per token (MLA): which modules they are, and their weights by role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from specattn.blocks import Norm, Projection, Unrecognised
from specattn.decoding.model.families import FAMILIES, has_latents
from specattn.decoding.model.weights import (
    Reordered,
    expect_children,
    read_norm,
    read_projection,
    reordered,
)

Turns = Literal["halves", "neighbours", "neighbours, apart"]
"""What a rope turns against each other: the halves of what it turns, or neighbours, which then stay
neighbours, or are set apart into halves."""


@dataclass(frozen=True)
class Latents:
    """The weights of a layer of multi-head latent attention (arXiv 2405.04434, section 2.1).

    Queries come from `q`, of what `q_down` and its norm make of the stream, if there are such. A
    token's row is what `kv` makes: the latent, normed, of as many channels as `kv_norm` has, then
    the key that the rope turns. `up` [Hq, nope + Dv, rank] makes keys and values of a latent;
    `k_up` [Hq, rank, nope] is its first part, by which queries become such of latents.
    """

    q_down: Projection | None
    q_norm: Norm | None
    q: Projection
    kv: Projection
    kv_norm: Norm
    up: torch.Tensor
    k_up: torch.Tensor
    turns: Turns
    scaling: float
    out: Projection

    @property
    def heads(self) -> int:
        """Hq."""
        return self.up.shape[0]

    @property
    def rank(self) -> int:
        """Channels of a latent."""
        return self.up.shape[2]

    @property
    def nope(self) -> int:
        """Channels of a head that no rope turns."""
        return self.k_up.shape[2]

    @property
    def v_up(self) -> torch.Tensor:
        """The other part of `up`, [Hq, Dv, rank]."""
        return self.up[:, self.nope :]


def latent_modules(model: PreTrainedModel) -> dict[int, Any]:
    """Return the attention modules of the layers of a model with latents, by number."""
    if not has_latents(model.config):
        return {}
    layers = getattr(model.base_model, "layers", ())[: model.config.num_hidden_layers]
    return {n: getattr(layer, "self_attn", None) for n, layer in enumerate(layers)}


def latent_layers(model: PreTrainedModel) -> dict[int, Latents]:
    """Return the weights of all layers of a model with latents; raises `Unrecognised`."""
    order, modules = reordered(model), latent_modules(model).items()
    return {n: latent_layer(module, f"layer {n}", order) for n, module in modules}


def latent_layer(module: Any, where: str, order: Reordered, *, in_rows: bool = False) -> Latents:
    """Return the weights of one layer, views of the model's own tensors.

    `k_up` is a copy where kernels need its rows in one piece (`in_rows`), and all of `up` is one
    where the model has codes.
    """
    children = {name for name, _ in module.named_children()} if module is not None else set()
    queries = {"q_proj"} if "q_proj" in children else {"q_a_proj", "q_a_layernorm", "q_b_proj"}
    keys = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    expect_children(module, queries | keys, where)
    config, low = module.config, "q_proj" not in children
    if (config.rope_parameters or {}).get("llama_4_scaling_beta") is not None:
        raise Unrecognised(f"{where}: queries are scaled by position")  # far ones: no probe sees it
    up = read_projection(module.kv_b_proj, where)
    if up.bias is not None:
        raise Unrecognised(f"{where}: what makes keys of latents has a bias")
    weight = order.dense(up.weight, where, module.kv_a_layernorm.weight.dtype)
    weight = weight.unflatten(0, (module.num_heads, -1))
    k_up = weight[:, : module.qk_nope_head_dim]
    return Latents(
        q_down=read_projection(module.q_a_proj, where) if low else None,
        q_norm=read_norm(module.q_a_layernorm, where) if low else None,
        q=read_projection(module.q_b_proj if low else module.q_proj, where),
        kv=read_projection(module.kv_a_proj_with_mqa, where),
        kv_norm=read_norm(module.kv_a_layernorm, where),
        up=weight,
        k_up=order.transposed(k_up, where) if in_rows else k_up.mT,
        turns=_turns(config),
        scaling=float(module.scaling),
        out=read_projection(module.o_proj, where),
    )


def _turns(config: Any) -> Turns:
    family = FAMILIES.get(config.model_type)
    if family is not None and family.complex_rope:
        return "neighbours"
    return "neighbours, apart" if getattr(config, "rope_interleave", False) else "halves"
