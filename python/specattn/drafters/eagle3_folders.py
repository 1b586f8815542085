"""Reads EAGLE-3 drafters as others publish them: SafeAILab, SGLang (SpecForge) and speculators.

A folder has ``config.json`` and ``model.safetensors``.

=============  ==========================================  ========================================
layout         told by                                     the layer; layers of the target
=============  ==========================================  ========================================
SafeAILab      ``draft_vocab_size`` beside a Llama's own    ``midlayer.*``; always the usual ones
SGLang         ``architectures: [LlamaForCausalLMEagle3]``  ``midlayer.*``; ``eagle_config``, each
                                                           counted from 0, its output is read
speculators    ``speculators_model_type: eagle3``          ``layers.0.*``; at the top, each counted
                                                           from 0, its input is read
=============  ==========================================  ========================================

``t2d``, bool [V], says which tokens of the target the head knows, and ``d2t`` which of them each of
its own is: ``t2d`` follows from it, and a folder in which it does not is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig

from specattn.drafters.folders import read_config, read_weights
from specattn.drafters.layer import layer_fields

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OURS, _LAYER, _QK_NORM = "eagle3", "midlayer.", "midlayer.self_attn.q_norm.weight"
_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")  # of the target, for training


class Found(NamedTuple):
    """What `Eagle3Config` takes, and the weights by the drafter's own names."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]


def read_folder(folder: Path) -> Found | None:
    """Return the drafter of a folder of another's layout; None where it is of our own.

    ValueError: the folder holds no EAGLE-3 drafter, or one that `Eagle3Drafter` is not.
    """
    given = read_config(folder)
    if given.get("model_type") == _OURS:
        return None
    layer, layers, target = _layout(folder, given)
    for what, found, expected in (
        ("num_hidden_layers", layer.get("num_hidden_layers", 1), 1),
        ("hidden_act", layer.get("hidden_act", "silu"), "silu"),
        ("mlp_bias", layer.get("mlp_bias", False), False),
        ("parallel_drafting", given.get("parallel_drafting", False), False),
    ):
        if found != expected:
            raise ValueError(f"{folder}: {what} must be {expected!r}, got {found!r}")
    weights = _weights(folder)
    llama: Any = LlamaConfig(**layer)  # fills in what a short config leaves out
    config = layer_fields(llama)
    config |= {name: bool(given.get(name, False)) for name in _NORMS}
    config |= {
        "target": target,
        "feature_layers": layers,
        "target_hidden_size": given.get("target_hidden_size"),
        "draft_vocab_size": given.get("draft_vocab_size"),
        "qkv_bias": bool(layer.get("attention_bias", False)),
        "qk_norm": _QK_NORM in weights,
        "own_embedding": "embed_tokens.weight" in weights,
    }
    _check_vocabulary(folder, config, weights)
    return Found(config, weights)


def _layout(folder: Path, given: dict[str, Any]) -> tuple[dict[str, Any], list[int] | None, str]:
    """Return the layer's configuration, behind which layers features are taken, and the target."""
    kind = given.get("speculators_model_type")
    if kind == "eagle3":
        verifier = given.get("speculators_config", {}).get("verifier", {})
        layers = given.get("eagle_aux_hidden_state_layer_ids")
        return given.get("transformer_layer_config", {}), layers, verifier.get("name_or_path") or ""
    architectures = given.get("architectures") or [given.get("model_type")]
    if kind is not None or "draft_vocab_size" not in given:
        what = f"speculators' {kind!r}" if kind is not None else f"a model of {architectures[0]!r}"
        raise ValueError(f"{folder} holds {what}, not an EAGLE-3 drafter")
    ids = (given.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return given, None if ids is None else [number + 1 for number in ids], ""


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights by our names, without copies of the target's."""
    held = read_weights(folder).items()
    named = {name.replace("layers.0.", _LAYER, 1): weight for name, weight in held}
    return {name: weight for name, weight in named.items() if name not in _COPIES}


def _check_vocabulary(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    """Leave of both maps what is needed; raise ValueError where they contradict each other."""
    known, size = weights.pop("t2d", None), config["vocab_size"]
    if config["draft_vocab_size"] in (None, size):
        weights.pop("d2t", None)
        return
    if (offsets := weights.get("d2t")) is None:
        raise ValueError(
            f"{folder}: a head of {config['draft_vocab_size']} of {size} tokens needs d2t"
        )
    weights["d2t"] = offsets = offsets.to(torch.int64)
    tokens = offsets + torch.arange(len(offsets), device="cpu")
    if bool((tokens < 0).any()) or bool((tokens >= size).any()):
        raise ValueError(f"{folder}: d2t names tokens from {int(tokens.min())} to "
                         f"{int(tokens.max())} of a vocabulary of {size}")  # fmt: skip
    if known is not None and known.bool().nonzero()[:, 0].tolist() != sorted(tokens.tolist()):
        count = int(known.bool().sum())
        raise ValueError(
            f"{folder}: t2d has {count} tokens, which are not the {len(tokens)} of d2t"
        )
