"""MTP heads: a layer behind a checkpoint's last one, which transformers leaves unread.

Checkpoints that were trained to predict more than one token hold such a layer beside their own. It
drafts as EAGLE's does: a *pair* at position t is token t + 1 and the feature of token t, which is
what the model's head reads (DeepSeek-V3, arXiv 2412.19437, section 2.2)::

    x = project([norm of the embedding of token t + 1; norm of the feature of token t])
    x = layer(x)                                  one of the model's own kind, over pairs
    norm(x)                                       stands for the feature of token t + 1
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from specattn.blocks import Norm, Projection, Unrecognised, norm_of, projection
from specattn.decoding.model.families import cache_shape
from specattn.decoding.model.parts import Attention, Layer, drafter_layer, read_layer
from specattn.decoding.model.weights import read_norm, reordered
from specattn.drafters import MtpDrafter

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class MtpHead:
    """An MTP head by its weights.

    Attributes
    ----------
    embedding_norm, feature_norm : Norm
    project : Projection
        Of both side by side, [H, 2 H].
    feature_first : bool
        Whether the feature is the first of the two.
    layer : Layer
    norm : Norm
    head_dim : int
    rotary : Module or None
        The rope that the layer's queries and keys are turned by.
    module : Module or None
        transformers' own module of the layer, where there is one.
    """

    embedding_norm: Norm
    feature_norm: Norm
    project: Projection
    feature_first: bool
    layer: Layer
    norm: Norm
    head_dim: int
    rotary: nn.Module | None
    module: nn.Module | None = None

    @property
    def attention(self) -> Attention:
        """The layer's attention: it is none with a state."""
        return cast(Attention, self.layer.attention)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return len(self.attention.k.weight) // self.head_dim

    @property
    def logits(self) -> dict[str, Any]:
        """Options of the layer's attention."""
        own = self.attention
        return {"softmax_scale": own.scaling, "softcap": own.softcap, "sinks": own.sinks}


def head_of(drafter: MtpDrafter) -> MtpHead:
    """Return a head that was trained apart, by its own weights: they may be learning."""
    own: Any = drafter
    return MtpHead(
        embedding_norm=norm_of(own.enorm),
        feature_norm=norm_of(own.hnorm),
        project=projection(own.eh_proj),
        feature_first=False,
        layer=drafter_layer(own, drafter.config.head_dim),
        norm=norm_of(own.shared_head["norm"]),
        head_dim=drafter.config.head_dim,
        rotary=drafter.rotary_emb,
    )


class Layout(NamedTuple):
    """How checkpoints name a head's weights: the layer's prefix, and the other four.

    `{depth}` stands for the model's number of layers.
    """

    layer: str
    embedding_norm: str
    feature_norm: str
    project: str
    norm: str
    feature_first: bool = False

    def of(self, depth: int) -> Layout:
        """Return the layout of a model of so many layers."""
        names = self._asdict()
        found = {n: x.format(depth=depth) for n, x in names.items() if isinstance(x, str)}
        return Layout(**{**names, **found})


LAYOUTS = {
    "Qwen3-Next, Qwen 3.5": Layout(
        "mtp.layers.0.",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    ),
    "DeepSeek-V3, GLM-4 MoE": Layout(
        "model.layers.{depth}.",
        "model.layers.{depth}.enorm.weight",
        "model.layers.{depth}.hnorm.weight",
        "model.layers.{depth}.eh_proj.weight",
        "model.layers.{depth}.shared_head.norm.weight",
    ),
    "MiMo": Layout(
        "model.mtp_layers.0.",
        "model.mtp_layers.0.token_layernorm.weight",
        "model.mtp_layers.0.hidden_layernorm.weight",
        "model.mtp_layers.0.input_proj.weight",
        "model.mtp_layers.0.final_layernorm.weight",
        feature_first=True,
    ),
}
"""By the families that have it. Of several heads the first is read, and drafts at every depth."""

_COPIES = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
"""Of the model's own tables, which are read in their place."""


class Found(NamedTuple):
    """A head in a folder: in which layout, and which file has which of its weights."""

    family: str
    layout: Layout
    files: dict[str, Path]


def find_head(folder: Path, depth: int) -> Found | None:
    """Return where the MTP head of a checkpoint of `depth` layers is, None where there is none.

    ValueError: a file cannot be read, or some of the head's weights are missing.
    """
    where: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                where |= dict.fromkeys(opened.keys(), file)
        except SafetensorError as error:
            raise ValueError(f"the weights in {file} cannot be read: {error}") from None
    for family, layout in LAYOUTS.items():
        layout = layout.of(depth)
        if layout.project not in where:
            continue
        own = {name for name in where if name.startswith(layout.layer)} - set(layout[1:5])
        if missing := [name for name in layout[1:5] if name not in where]:
            raise ValueError(f"the MTP head in {folder} lacks {', '.join(missing)}")
        files = {name: where[name] for name in (*own, *layout[1:5]) if not name.endswith(_COPIES)}
        return Found(family, layout, files)
    return None


def looked_for(depth: int) -> str:
    """Return which weights a head is recognised by, for messages."""
    return ", ".join(layout.of(depth).project for layout in LAYOUTS.values())


def read_head(model: PreTrainedModel, found: Found) -> MtpHead:
    """Return a head as a layer of the kind that `model` has, in its dtype and on its device.

    Raises ValueError where its weights do not fit such a layer, `Unrecognised` where the layer
    does something of which its parts say nothing.
    """
    base: Any = model.base_model
    layout, tensors = found.layout, _tensors(found)
    ends = {name: _placed(tensors.pop(name), model) for name in layout[1:5]}
    width, project = model.config.hidden_size, ends[layout.project]
    if list(project.shape) != [width, 2 * width]:
        raise ValueError(
            f"the MTP head does not fit the model: {layout.project} is {list(project.shape)}, "
            f"expected {[width, 2 * width]}"
        )
    module = _module(model, {name.removeprefix(layout.layer): x for name, x in tensors.items()})
    layer = read_layer(module, "the MTP layer", reordered(model))
    if not isinstance(layer.attention, Attention):
        raise Unrecognised("its layer has latents (MLA), for which drafters have no cache yet")

    def norm(name: str) -> Norm:
        own = copy.deepcopy(base.norm)
        own.weight = nn.Parameter(ends[name], requires_grad=False)
        return read_norm(own, "the MTP head")

    return MtpHead(
        embedding_norm=norm(layout.embedding_norm),
        feature_norm=norm(layout.feature_norm),
        project=Projection(project, None),
        feature_first=layout.feature_first,
        layer=layer,
        norm=norm(layout.norm),
        head_dim=cache_shape(model.config).head_dim,
        rotary=getattr(base, "rotary_emb", None),
        module=module,
    )


def _tensors(found: Found) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(set(found.files.values())):
        with safe_open(file, framework="pt") as opened:
            names = (name for name, where in found.files.items() if where == file)
            tensors |= {name: opened.get_tensor(name) for name in names}
    return tensors


def _placed(x: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    return x.to(model.device, model.dtype)


def _module(model: PreTrainedModel, tensors: Tensors) -> nn.Module:
    """Return a layer as the model's attending ones are, with these weights."""
    base: Any = model.base_model
    like = next(layer for layer in reversed(base.layers) if hasattr(layer, "self_attn"))
    with torch.device("meta"):
        module = type(like)(_config(model), 0).eval()
    wanted, dtypes = module.state_dict(), {n: x.dtype for n, x in like.state_dict().items()}
    tensors = _joined(tensors, wanted)
    for kind, names in (
        ("missing", wanted.keys() - tensors.keys()),
        ("unexpected", tensors.keys() - wanted.keys()),
        ("misshapen", {n for n in wanted.keys() & tensors if wanted[n].shape != tensors[n].shape}),
    ):
        if names:
            raise ValueError(
                f"the MTP layer is not one as the model's own: {kind} {', '.join(sorted(names))}"
            )
    cast = {n: x.to(model.device, dtypes.get(n, model.dtype)) for n, x in tensors.items()}
    module.load_state_dict(cast, assign=True)
    return module.requires_grad_(False)


def _config(model: PreTrainedModel) -> Any:
    """Return the configuration of a model that is this one layer, with full attention."""
    config: Any = copy.deepcopy(model.config.get_text_config(decoder=True))
    config.num_hidden_layers = 1
    config._attn_implementation = "eager"
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"]
    for name, first in (("first_k_dense_replace", 0), ("mlp_only_layers", [])):
        if hasattr(config, name):  # a head of a mixture of experts is one as well
            setattr(config, name, first)
    return config


_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def _joined(tensors: Tensors, wanted: Tensors) -> Tensors:
    """Return weights with those of single experts side by side, where the module has them so."""
    found, experts = dict[str, torch.Tensor](), dict[tuple[str, str], dict[int, torch.Tensor]]()
    for name, x in tensors.items():
        one = _EXPERT.fullmatch(name)
        if one is None or f"{one[1]}.gate_up_proj" not in wanted:
            found[name] = x
        else:
            experts.setdefault((one[1], one[3]), {})[int(one[2])] = x
    stacked = {k: torch.stack([x for _, x in sorted(all_.items())]) for k, all_ in experts.items()}
    for module in {module for module, _ in stacked}:
        parts = [stacked[module, part] for part in ("gate", "up") if (module, part) in stacked]
        found[f"{module}.gate_up_proj"] = torch.cat(parts, 1)
        if (module, "down") in stacked:
            found[f"{module}.down_proj"] = stacked[module, "down"]
    return found
