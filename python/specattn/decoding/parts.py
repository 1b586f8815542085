"""The parts of a model: weights by their role, read from its modules.

A pass that runs by kernels needs them (`static_pass.py`). What is not recognised is not guessed:
the model then runs through its own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel


class Unrecognised(ValueError):
    """A model does something of which its parts say nothing; the message says what."""


class Projection(NamedTuple):
    """``x @ weight.T + bias``: weight [N, K], bias [N] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Norm(NamedTuple):
    """``x / sqrt(mean(x**2) + eps) * weight``: weight [H]."""

    weight: torch.Tensor
    eps: float


class GatedMLP(NamedTuple):
    """``down(activation(gate(x)) * up(x))``."""

    gate: Projection
    up: Projection
    down: Projection
    activation: str


@dataclass(frozen=True)
class Layer:
    """A decoder layer: ``x += out(attention(norm(x)))``, then ``x += mlp(mlp_norm(x))``.

    Attributes
    ----------
    norm, mlp_norm : Norm
    q, k, v, out : Projection
    q_norm, k_norm : Norm or None
        Over each head.
    scaling : float
        Factor of the logits.
    sinks : Tensor [Hq], or None
    mlp : GatedMLP or Module
        A module where it is something else, a mixture of experts for one.
    """

    norm: Norm
    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    scaling: float
    sinks: torch.Tensor | None
    out: Projection
    mlp_norm: Norm
    mlp: GatedMLP | nn.Module


@dataclass(frozen=True)
class Parts:
    """Embedding [V, H], layers, last norm, head, and the module that turns positions to angles."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: Norm
    head: Projection
    rotary: nn.Module


_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


def parts_of(model: PreTrainedModel) -> Parts:
    """Return the parts of `model`, whose tensors are the model's own.

    Raises
    ------
    Unrecognised
    """
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise Unrecognised(f"{name or 'the model'} has forward hooks")
    base = cast(Any, model.base_model)
    _expect_children(base, {"embed_tokens", "layers", "norm", "rotary_emb"}, "the model")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        raise Unrecognised(f"the embedding is a {type(embedding).__name__}")
    return Parts(
        embedding=embedding.weight.detach(),
        layers=[_layer(layer, f"layer {n}") for n, layer in enumerate(base.layers)],
        norm=_norm(base.norm, "the last norm"),
        head=_projection(head, "the head"),
        rotary=base.rotary_emb,
    )


def _layer(layer: Any, where: str) -> Layer:
    children = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    _expect_children(layer, children, where)
    attention = layer.self_attn
    optional = {"q_norm", "k_norm"}
    present = {name for name, _ in attention.named_children()} & optional
    _expect_children(attention, {"q_proj", "k_proj", "v_proj", "o_proj"} | present, where)
    own = {name for name, _ in attention.named_parameters(recurse=False)}
    if own - {"sinks"}:
        raise Unrecognised(f"{where}: attention has {', '.join(sorted(own))}")
    q_norm, k_norm = (
        _norm(getattr(attention, name), where) if name in present else None
        for name in ("q_norm", "k_norm")
    )
    if q_norm is not None and q_norm.weight.shape != (attention.head_dim,):
        raise Unrecognised(f"{where}: queries are not normed by head")
    return Layer(
        norm=_norm(layer.input_layernorm, where),
        q=_projection(attention.q_proj, where),
        k=_projection(attention.k_proj, where),
        v=_projection(attention.v_proj, where),
        q_norm=q_norm,
        k_norm=k_norm,
        scaling=float(attention.scaling),
        sinks=attention.sinks.detach() if "sinks" in own else None,
        out=_projection(attention.o_proj, where),
        mlp_norm=_norm(layer.post_attention_layernorm, where),
        mlp=_mlp(layer.mlp, where),
    )


def _mlp(mlp: nn.Module, where: str) -> GatedMLP | nn.Module:
    children = dict(mlp.named_children())
    activation = _ACTIVATIONS.get(type(children.get("act_fn")).__name__)
    if children.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"} or activation is None:
        return mlp
    gate, up, down = (
        _projection(children[name], where) for name in ("gate_proj", "up_proj", "down_proj")
    )
    return GatedMLP(gate, up, down, activation)


def _projection(module: Any, where: str) -> Projection:
    if type(module) is not nn.Linear:
        raise Unrecognised(f"{where}: a projection is a {type(module).__name__}")
    bias = None if module.bias is None else module.bias.detach()
    return Projection(module.weight.detach(), bias)


def _norm(module: Any, where: str) -> Norm:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or eps is None:
        raise Unrecognised(f"{where}: a norm is a {type(module).__name__}")
    return Norm(module.weight.detach(), float(eps))


def _expect_children(module: nn.Module, expected: set[str], where: str) -> None:
    children = {name for name, _ in module.named_children()}
    if children != expected:
        odd = ", ".join(sorted(children ^ expected))
        raise Unrecognised(f"{where} differs from what is known in {odd}")
