"""Refuses models that compute something else with our attention; asks each once.

No list says which models are taken. One that is new runs some random tokens through its own eager
attention and through ours (`probe.py`); what differs is refused, with the figure and the layer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import specattn
from specattn.backends.select import chosen
from specattn.decoding.model.families import FAMILIES, cache_shape, check_supported, has_states
from specattn.decoding.model.model import Model
from specattn.decoding.model.structure import Structure, code_of, structure_of
from specattn.decoding.model.text_model import check_device, text_model
from specattn.decoding.passes.probe import first_mismatch
from specattn.files import cache_named, keep

BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of a row of features or logits, relative; what a wrong weight, window or factor does is far more.
Of float64 too models compute a softmax in float32, and states, whose errors add up over a text."""

_AT_RANDOM = "drop", "jitter"  # in the names of rates that hold in training


def prove(model: PreTrainedModel, *, trust_family: bool = False) -> None:
    """Take a model, or say why it cannot be decoded.

    A `Target` does this by itself; before, it shows errors early. What was found is remembered with
    the model as long as its modules, what runs when they are called, and its configuration stay as
    they are (docs/checked.md). It is also in the folder that the environment variable
    ``SPECATTN_CACHE`` names, if it names one: for models of the same classes, code, configuration,
    shapes and versions of software, to which nothing was added.

    Parameters
    ----------
    model : PreTrainedModel
    trust_family : bool
        Take models of `FAMILIES` unasked.

    Raises
    ------
    ValueError
        With its own attention and with ours, the model computes something else, or it keeps
        something that this package does not; it drops values at random, as dropout does in
        training; or `torch.autocast` is on.
    """
    model = text_model(model)
    check_device(model)
    proved(model, trust_family=trust_family)


def proved(model: PreTrainedModel, *, trust_family: bool = False) -> Structure:
    """Return the structure of a text model that is taken; else raise, as `prove` does."""
    check_supported(model.config)
    if torch.is_autocast_enabled(model.device.type):
        dtype = torch.get_autocast_dtype(model.device.type)
        raise ValueError(
            f"torch.autocast({model.device.type!r}, {dtype}) is on, under which passes of several "
            "tokens differ from plain decoding: leave it, or convert the model with model.to(dtype)"
        )
    structure = structure_of(model)
    if structure.in_training:
        _refuse_dropout(model)
    dtypes = frozenset(parameter.dtype for parameter in model.parameters())
    where = structure.in_training, model.dtype, dtypes, model.device
    kind, known = ("proved", structure.number, *where), Model.of(model)
    if known.knows(kind):
        return structure
    _check_layers(model)
    trusted = trust_family and model.config.model_type in FAMILIES
    if structure.replaced is not None or not trusted:
        note = _note(model) if structure.replaced is None else None
        if note is None or not os.path.exists(note):
            _probe(model)
            if note is not None:
                of = f"{model.config.model_type}\n"
                keep(note.parent.parent, note, lambda path: path.write_text(of))
    known.recall(kind, lambda: True)
    return structure


def _check_layers(model: PreTrainedModel) -> None:
    """Raise ValueError where a model has other sizes than its configuration says."""
    layers, wanted = getattr(model.base_model, "layers", None), model.config.num_hidden_layers
    if isinstance(layers, torch.nn.ModuleList) and len(layers) < wanted:
        raise ValueError(
            f"num_hidden_layers is {wanted} in the model's configuration, and the model has "
            f"{len(layers)} layers: set model.config.num_hidden_layers = {len(layers)}"
        )
    rows = getattr(getattr(model.get_input_embeddings(), "weight", None), "shape", [math.inf])[0]
    if rows < model.config.vocab_size:
        raise ValueError(
            f"vocab_size is {model.config.vocab_size} in the model's configuration, and its "
            f"embedding has {rows} rows"
        )
    shape = cache_shape(model.config)
    for layer in layers if isinstance(layers, torch.nn.ModuleList) else ():
        keys = getattr(getattr(layer, "self_attn", None), "k_proj", None)
        width = shape.kv_heads * shape.head_dim
        if type(keys) is torch.nn.Linear and shape.latent is None and keys.out_features != width:
            raise ValueError(
                f"num_key_value_heads and head_dim are {shape.kv_heads} and {shape.head_dim} in "
                f"the model's configuration, and keys of the model have {keys.out_features} "
                "channels in all"
            )


def _refuse_dropout(model: PreTrainedModel) -> None:
    """Raise ValueError where a module in training mode computes at random."""
    for name, module in model.named_modules():
        rates = {n: x for n, x in vars(module).items() if any(word in n for word in _AT_RANDOM)}
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            rates["p"] = module.p
        for option, rate in rates.items():
            if module.training and isinstance(rate, float) and rate > 0:
                raise ValueError(
                    f"the model is in training mode, in which {name or 'it'} computes at random "
                    f"({option}={rate}): call model.eval() first"
                )


def _probe(model: PreTrainedModel) -> None:
    kind, bound = model.config.model_type, BOUNDS[model.dtype]
    if has_states(model.config):
        bound = max(bound, BOUNDS[torch.float32])
    found = first_mismatch(model, bound)
    if found is None:
        return
    apart = f"differ by {found.error:.1e} in their logits (at most {bound:.0e} in {model.dtype})"
    if math.isnan(found.error):
        apart = "have NaN among their logits"
        for name, weight in model.named_parameters():
            if weight.isnan().any():
                raise ValueError(f"the model's {name} has NaN among its values")
    replaced = structure_of(model).replaced
    added = "" if replaced is None else f"; {replaced}"
    raise ValueError(
        f"models of type {kind!r} are not supported: random tokens through this package's "
        f"attention and through the model's own {apart}, first in {found.where}{added}"
    )


def _note(model: PreTrainedModel) -> Path | None:
    """Return the file that stands for what was found of models such as this one."""
    if (folder := cache_named()) is None or Model.ranks_of(model) is not None:
        return None  # ranks of one model all ask it, or none
    _, backend = chosen("hybrid_tree_attention", model.device, model.dtype)
    facts = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": model.config.to_dict(),
        "code": code_of(model),
        "shapes": [(name, list(x.shape)) for name, x in model.named_parameters()],
        "where": [str(model.dtype), model.device.type, backend.name],
        "versions": [specattn.__version__, torch.__version__, transformers.__version__],
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return folder / "proven" / key
