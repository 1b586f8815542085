"""Reads EAGLE-3 drafters as others publish them: SafeAILab, SGLang, AngelSlim, NVIDIA, speculators.

A folder has ``config.json`` and ``model.safetensors``; `layouts` has a table of either layout.

============  ========================================  ==========================================
layout        told by                                   the layer; layers of the target
============  ========================================  ==========================================
flat          ``draft_vocab_size`` or ``architectures``  ``midlayer.*``; ``eagle_config``, each
              with "eagle3", beside a Llama's own       counted from 0, its output is read
speculators   ``speculators_model_type: eagle3``        ``layers.0.*``; at the top, each counted
                                                        from 0, its input is read
============  ========================================  ==========================================

``t2d``, bool [V], says which tokens of the target the head knows, and ``d2t`` which of them each of
its own is: ``t2d`` follows from it, and a folder in which it does not is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specattn.drafters.drafter import Found
from specattn.drafters.eagle3_config import Eagle3Config
from specattn.drafters.fields import TEXTS, Values, read_fields
from specattn.drafters.folders import read_config, read_weights
from specattn.drafters.layer import layer_fields
from specattn.drafters.layouts import (
    EAGLE3,
    SPECULATORS_EAGLE3,
    as_in_family,
    filled_sizes,
    windows,
)

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OURS, _LAYER, _QK_NORM = "eagle3", "midlayer.", "midlayer.self_attn.q_norm.weight"
_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")  # of the target, for training
_NESTED = "transformer_layer_config."


def read_folder(folder: Path) -> Found | None:
    """Return the drafter of a folder of another's layout; None where it is of our own.

    ValueError: the folder holds no EAGLE-3 drafter, or one that `Eagle3Drafter` is not.
    """
    given = read_config(folder)
    if given.get("model_type") == _OURS or given.get("architectures") == ["Eagle3Drafter"]:
        return None
    if nested := _in_speculators(folder, given):
        fields, prefix = SPECULATORS_EAGLE3, _NESTED
    else:
        fields, prefix = EAGLE3, ""
    values = read_fields(folder, given, fields)
    layer = values.under(prefix)
    family = layer["model_type"]
    weights, llama = _weights(folder), as_in_family(layer, family, prefix)
    window = windows(layer, family, 1, prefix)[0]
    config = layer_fields(llama)
    config |= {name: values[name] for name in _NORMS}
    config |= {
        "target": values["speculators_config.verifier.name_or_path"] if nested else "",
        "feature_layers": _input_layers(values) if nested else _feature_layers(values),
        "target_hidden_size": values["target_hidden_size"],
        "draft_vocab_size": values["draft_vocab_size"],
        "qkv_bias": layer["attention_bias"],
        "qk_norm": _QK_NORM in weights,
        "own_embedding": "embed_tokens.weight" in weights,
        "window": window,
    }
    _check_vocabulary(folder, config, weights, prefix + "vocab_size")
    return Found(Eagle3Config(**config), weights, filled_sizes(values, fields, llama, prefix))


def _in_speculators(folder: Path, given: dict[str, Any]) -> bool:
    """Whether a folder is of speculators' layout; ValueError: it holds no EAGLE-3 drafter."""
    kind, names = given.get("speculators_model_type"), given.get("architectures")
    if kind == "eagle3":
        return True
    if names is not None and not TEXTS.holds(names):
        raise ValueError(f"{folder}: architectures must be {TEXTS.said}, got {names!r}")
    if kind is not None:
        what, why = f"speculators' {kind!r}", "speculators_model_type is another"
    elif given.get("transformer_layer_config") is not None:
        what, why = "a transformer_layer_config", "it has no speculators_model_type"
    elif given.get("draft_vocab_size") is None and "eagle3" not in "".join(names or ()).lower():
        what = f"a model of {(names or [given.get('model_type')])[0]!r}"
        why = "it has no draft_vocab_size, and its architectures name none"
    else:
        return False
    raise ValueError(f"{folder} holds {what}, not an EAGLE-3 drafter: {why}")


def _input_layers(values: Values) -> list[int] | None:
    """Return behind how many layers features are taken, where layers are named by their inputs."""
    name = "eagle_aux_hidden_state_layer_ids"
    if (found := values[name]) is not None and 0 in found:
        raise ValueError(f"{values.folder}: {name} must be from 1 on, got {found}")
    return found


def _feature_layers(values: Values) -> list[int] | None:
    """Return behind how many layers features are taken, however a flat folder names them."""
    outputs = ("eagle_config.eagle_aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids")
    found = values.one_of(*outputs)
    behind = None if found is None else [number + 1 for number in found]
    inputs = _input_layers(values)
    if None not in (behind, inputs) and behind != inputs:
        raise ValueError(
            f"{values.folder}: eagle_aux_hidden_state_layer_ids, whose inputs are read, is "
            f"{inputs}, and the layers whose outputs are read are {found}: not the same"
        )
    layers = inputs if behind is None else behind
    number = values["num_aux_hidden_states"]
    if number not in (None, 3 if layers is None else len(layers)):
        raise ValueError(
            f"{values.folder}: num_aux_hidden_states is {number}, the layers are {layers}"
        )
    return layers


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights by our names, without copies of the target's."""
    held = read_weights(folder).items()
    named = {name.replace("layers.0.", _LAYER, 1): weight for name, weight in held}
    return {name: weight for name, weight in named.items() if name not in _COPIES}


def _check_vocabulary(
    folder: Path, config: dict[str, Any], weights: dict[str, Any], name: str
) -> None:
    """Leave of both maps what is needed; raise ValueError where they contradict each other."""
    known, size, own = weights.pop("t2d", None), config["vocab_size"], config["draft_vocab_size"]
    if known is not None and len(known) != size:
        raise ValueError(f"{folder}: t2d is of {len(known)} tokens, {name} is {size}")
    if own in (None, size):
        weights.pop("d2t", None)
        return
    if own > size:
        raise ValueError(f"{folder}: draft_vocab_size is {own}, {name} {size}")
    if (offsets := weights.get("d2t")) is None:
        raise ValueError(
            f"{folder}: a head of {own} of {size} tokens needs d2t (draft_vocab_size, {name})"
        )
    weights["d2t"] = offsets = offsets.to(torch.int64)
    tokens = offsets + torch.arange(len(offsets), device="cpu")
    if bool((tokens < 0).any()) or bool((tokens >= size).any()):
        found = f"{int(tokens.min())} to {int(tokens.max())}"
        raise ValueError(
            f"{folder}: d2t names tokens from {found} of a vocabulary of {size} ({name})"
        )
    if known is not None and known.bool().nonzero()[:, 0].tolist() != sorted(tokens.tolist()):
        count = int(known.bool().sum())
        raise ValueError(
            f"{folder}: t2d has {count} tokens, which are not the {len(tokens)} of d2t"
        )
