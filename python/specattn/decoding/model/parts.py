"""The parts of a model: weights by their role, read from its modules.

A decoder that is a function of `ops` is computed from them (`passes/decoder.py`). What is not
recognised is not guessed: the model then runs through its own modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specattn.blocks import (
    Norm,
    Projection,
    Unrecognised,
    embedding_scale,
    norm_of,
    projection,
)
from specattn.decoding.model.latents import Latents, latent_layer
from specattn.decoding.model.model import Model
from specattn.decoding.model.recurrent import GatedDelta, gated_delta_layer
from specattn.decoding.model.weights import (
    Reordered,
    expect_children,
    read_dense,
    read_norm,
    read_projection,
    reordered,
    split_projection,
)
from specattn.distributed.tensor import TensorParallel


class GatedMLP(NamedTuple):
    """``down(activation(gate(x)) * up(x))``."""

    gate: Projection
    up: Projection
    down: Projection
    activation: str


class SubLayer(NamedTuple):
    """How ``x += factor * out_norm(inner(norm(x)))`` enters and leaves; a norm may be missing."""

    norm: Norm | None
    out_norm: Norm | None
    factor: float


@dataclass(frozen=True)
class Attention:
    """The weights of a layer's attention.

    Queries and keys are normed over each head or, by norms as wide as all of them, over all.
    `scaling` and `softcap` (0.0: none) are of the logits, `sinks` [Hq]; `rope` names what turns
    queries and keys (`Parts.ropes`), None where nothing does. The sigmoid of `gate`, if there is
    one, is a factor of what is attended to.
    """

    q: Projection
    k: Projection
    v: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    scaling: float
    softcap: float
    sinks: torch.Tensor | None
    rope: str | None
    gate: Projection | None
    out: Projection

    @property
    def norms_whole_rows(self) -> bool:
        """Whether queries and keys are normed over all heads at once."""
        return self.q_norm is not None and len(self.q_norm.weight) == len(self.q.weight)


@dataclass(frozen=True)
class Layer:
    """A decoder layer: attention, latents or a state, and its MLP, each added to the stream.

    The MLP is a module where it is something else, such as a mixture of experts.
    """

    attention: Attention | Latents | GatedDelta
    mlp: GatedMLP | nn.Module
    around_attention: SubLayer
    around_mlp: SubLayer


@dataclass(frozen=True)
class Parts:
    """What a model is made of.

    `ropes` are the kinds of layers that `rotary` has angles for, "" where there is one. Of ranks
    that a model is divided over these are one's rows of embedding and head, heads, and columns of
    the MLP: what `out` and `down` give is then a part of a sum.
    """

    embedding: torch.Tensor
    embedding_scale: float
    layers: list[Layer]
    norm: Norm
    head: Projection
    rotary: nn.Module | None
    ropes: tuple[str, ...]
    tensor_parallel: TensorParallel | None

    @property
    def vocabulary(self) -> int:
        """V, of all parts."""
        parts = 1 if self.tensor_parallel is None else self.tensor_parallel.size
        return self.head.weight.shape[0] * parts


_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}

_DIVIDED = {
    "embed_tokens": "embedding_rowwise",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
    "lm_head": "colwise_gather_output",
}

_Names = tuple[str | None, str | None]
# Norms before and after attention, then before and after the MLP, by which of them a layer has.
_NORMS: dict[frozenset[str], tuple[_Names, _Names]] = {
    frozenset(name for pair in pairs for name in pair if name): pairs
    for pairs in (
        (("input_layernorm", None), ("post_attention_layernorm", None)),
        (
            ("input_layernorm", "post_attention_layernorm"),
            ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
        ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
    )
}


def parts_of(model: PreTrainedModel) -> Parts:
    """Return the parts of `model`, its own tensors wherever they can be; raises `Unrecognised`."""
    tensor = _tensor_parallel(model)
    base = cast(Any, model.base_model)
    rotary = getattr(base, "rotary_emb", None)
    names = {"embed_tokens", "layers", "norm"} | ({"rotary_emb"} if rotary is not None else set())
    expect_children(base, names, "the model")
    order = reordered(model)
    embedding: Any = model.get_input_embeddings()
    layers = base.layers[: model.config.num_hidden_layers]  # those that the model runs
    parts = Parts(
        embedding=read_dense(embedding.weight, "the embedding"),
        embedding_scale=embedding_scale(embedding) * getattr(base, "embedding_multiplier", 1.0),
        layers=[read_layer(layer, f"layer {n}", order) for n, layer in enumerate(layers)],
        norm=read_norm(base.norm, "the last norm"),
        head=read_projection(model.get_output_embeddings(), "the head"),
        rotary=rotary,
        ropes=() if rotary is None else tuple(getattr(rotary, "layer_types", ("",))),
        tensor_parallel=tensor,
    )
    if len(dtypes := {parts.embedding.dtype, *_dtypes(parts)}) > 1:
        raise Unrecognised(f"its weights are of {', '.join(sorted(map(str, dtypes)))}")
    for n, layer in enumerate(parts.layers):
        rope = getattr(layer.attention, "rope", None)
        if rope is not None and parts.ropes and rope not in parts.ropes:
            raise Unrecognised(f"layer {n}: there is no rope for {rope}")
    return parts


def _dtypes(part: Any) -> Iterator[torch.dtype]:
    """Yield the dtypes of projections and norms: kernels take those of one alone."""
    if isinstance(part, (Norm, Projection)):
        if isinstance(part.weight, torch.Tensor):
            yield part.weight.dtype
    elif isinstance(part, (list, tuple)):
        for one in part:
            yield from _dtypes(one)
    elif isinstance(part, (Parts, Layer, Attention)):
        yield from _dtypes(list(vars(part).values()))


def _tensor_parallel(model: PreTrainedModel) -> TensorParallel | None:
    """Return the ranks that a model is divided over as `Parts` says."""
    tensor = Model.ranks_of(model)
    if tensor is None:
        return None
    plan = {rule.rpartition(".")[2]: style for rule, style in (model.tp_plan or {}).items()}
    for name, style in _DIVIDED.items():
        if plan.get(name) != style:
            raise Unrecognised(f"its plan divides {name} as {plan.get(name)}")
    if model.config.vocab_size % tensor.size:
        raise Unrecognised(f"{tensor.size} parts of its vocabulary are not equally large")
    return tensor


def read_layer(layer: Any, where: str, order: Reordered) -> Layer:
    """Return the weights of one layer's module; raises `Unrecognised`."""
    children = {name for name, child in layer.named_children() if not isinstance(child, nn.Dropout)}
    mixer = "linear_attn" if "linear_attn" in children else "self_attn"
    norms = _NORMS.get(frozenset(children - {mixer, "mlp"}))
    if norms is None or not children >= {mixer, "mlp"}:
        raise Unrecognised(f"{where} is made of {', '.join(sorted(children))}")
    scale = getattr(layer, "residual_scale", 1.0)  # MiniCPM 3 calls it so
    factor = float(getattr(layer, "residual_multiplier", scale))
    around = [
        SubLayer(_norm_if(layer, before, where), _norm_if(layer, after, where), factor)
        for before, after in norms
    ]
    module: Any = getattr(layer, mixer)
    read: Any = gated_delta_layer if mixer == "linear_attn" else _attention
    if hasattr(module, "kv_a_proj_with_mqa"):
        read = partial(latent_layer, in_rows=True)
    return Layer(read(module, where, order), _mlp(layer.mlp, where), *around)


def _norm_if(layer: Any, name: str | None, where: str) -> Norm | None:
    return None if name is None else read_norm(getattr(layer, name), where)


def _attention(attention: Any, where: str, order: Reordered) -> Attention:
    present = {name for name, _ in attention.named_children()}
    fused = {"qkv_proj"} if "qkv_proj" in present else {"q_proj", "k_proj", "v_proj"}
    expect_children(attention, {*fused, "o_proj"} | present & {"q_norm", "k_norm"}, where)
    own = {name for name, _ in attention.named_parameters(recurse=False)}
    if own - {"sinks"}:
        raise Unrecognised(f"{where}: attention has {', '.join(sorted(own))}")
    if (attention.config.rope_parameters or {}).get("llama_4_scaling_beta") is not None:
        raise Unrecognised(f"{where}: queries are scaled by position")  # far ones: no probe sees it
    q, k, v, *gates = _heads(attention, fused, where, order)
    q_norm, k_norm = (
        read_norm(getattr(attention, name), where) if name in present else None
        for name in ("q_norm", "k_norm")
    )
    for norm, made in ((q_norm, q), (k_norm, k)):
        if norm and len(norm.weight) not in (attention.head_dim, len(made.weight)):
            raise Unrecognised(f"{where}: queries are normed neither by head nor all together")
    softcap = getattr(attention, "attn_logit_softcapping", None)
    return Attention(
        q=q,
        k=k,
        v=v,
        q_norm=q_norm,
        k_norm=k_norm,
        scaling=float(attention.scaling),
        softcap=float(softcap or 0.0),
        sinks=attention.sinks.detach() if "sinks" in own else None,
        rope=_rope(attention),
        gate=gates[0] if gates else None,
        out=_summed(attention.o_proj, where),
    )


def _heads(attention: Any, names: set[str], where: str, order: Reordered) -> tuple[Projection, ...]:
    """Return the projections to queries, keys and values, and to gates where there are any."""
    if names != {"qkv_proj"}:
        width, heads = attention.head_dim, attention.config.num_attention_heads
        if getattr(attention.q_proj, "out_features", 0) == 2 * width * heads:
            q, gate = order.parts(attention.q_proj, heads, (width, width), where)
            k, v = (read_projection(x, where) for x in (attention.k_proj, attention.v_proj))
            return q, k, v, gate
        return tuple(read_projection(getattr(attention, f"{x}_proj"), where) for x in "qkv")
    kv = attention.num_key_value_heads * attention.head_dim
    return split_projection(
        attention.qkv_proj, (kv * attention.num_key_value_groups, kv, kv), where
    )


def _rope(attention: Any) -> str | None:
    """Return the name of the rope of a layer: that of its kind, where kinds have their own."""
    if not getattr(attention, "use_rope", True):
        return None
    if getattr(attention, "sliding_window", None) and not getattr(attention, "is_sliding", True):
        return None  # EXAONE 4: where some layers slide, those that do not have no rope
    if attention.config.rope_parameters is None:
        return None
    types, n = getattr(attention.config, "layer_types", None), attention.layer_idx
    by_type = any(isinstance(x, dict) for x in (attention.config.rope_parameters or {}).values())
    return types[n] if by_type and types else ""


def _mlp(mlp: nn.Module, where: str) -> GatedMLP | nn.Module:
    children = dict(mlp.named_children())
    names = children.keys() - {"act_fn", "activation_fn"}
    module = children.get("act_fn", children.get("activation_fn"))
    activation = _ACTIVATIONS.get(type(module).__name__)
    if activation is None:
        return mlp
    if names == {"gate_up_proj", "down_proj"}:
        fused = children["gate_up_proj"]
        half = getattr(fused, "out_features", 0) // 2
        gate, up = split_projection(fused, (half, half), where)
    elif names == {"gate_proj", "up_proj", "down_proj"}:
        gate, up = (read_projection(children[name], where) for name in ("gate_proj", "up_proj"))
    else:
        return mlp
    return GatedMLP(gate, up, _summed(children["down_proj"], where), activation)


def _summed(module: Any, where: str) -> Projection:
    """Return a projection whose results are summed over ranks; one of them adds the bias."""
    weight, bias = read_projection(module, where)
    mesh = getattr(module.weight, "device_mesh", None)
    return Projection(weight, bias if mesh is None or mesh.get_local_rank() == 0 else None)


def drafter_layer(module: Any, head_dim: int) -> Layer:
    """Return the weights of a drafter's `DecoderLayer`, which may be learning."""
    own = module.self_attn
    attention = Attention(
        q=projection(own.q_proj),
        k=projection(own.k_proj),
        v=projection(own.v_proj),
        q_norm=norm_of(own.q_norm),
        k_norm=norm_of(own.k_norm),
        scaling=head_dim**-0.5,
        softcap=0.0,
        sinks=None,
        rope="",
        gate=None,
        out=projection(own.o_proj),
    )
    gate, up, down = (projection(module.mlp[f"{part}_proj"]) for part in ("gate", "up", "down"))
    before, behind = norm_of(module.input_layernorm), norm_of(module.post_attention_layernorm)
    around = SubLayer(before, None, 1.0), SubLayer(behind, None, 1.0)
    return Layer(attention, GatedMLP(gate, up, down, "silu"), *around)
