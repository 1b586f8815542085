"""Reads and writes EAGLE drafters in the folder layout of the `speculators` library.

The layout (``speculators_model_type: eagle``) holds one Llama layer without an input norm behind a
fusion of embedding and feature: `PosSDrafter` with one layer, for EAGLE, EAGLE-2 and HASS alike. It
has no place for several specialists, for norms of queries and keys, for biases of their
projections, or for EAGLE 3.1's norms. Checkpoints with extra norms are other drafters, and
EAGLE-3's, which read three layers of the target, are `Eagle3Drafter`'s.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from specattn.drafters.drafter import Found
from specattn.drafters.fields import read_fields
from specattn.drafters.folders import read_config, read_weights
from specattn.drafters.layer import layer_fields
from specattn.drafters.layouts import SPECULATORS_EAGLE, as_in_family, filled_sizes
from specattn.drafters.poss import PosSConfig, PosSDrafter

_TYPE, _LAYER, _NESTED = "eagle", "LlamaDecoderLayer", "transformer_layer_config."

# Their names of weights, in the order in which ours hold them one after the other.
_WEIGHTS = {
    "fc.weight": ["fusion_fc.weight"],
    "fc.bias": ["fusion_fc.bias"],
    "specialists.0.attention.q_proj.weight": ["transformer.self_attn.q_proj.weight"],
    "specialists.0.attention.kv_proj.weight": [
        "transformer.self_attn.k_proj.weight",
        "transformer.self_attn.v_proj.weight",
    ],
    "specialists.0.attention.o_proj.weight": ["transformer.self_attn.o_proj.weight"],
    "specialists.0.norm.weight": ["transformer.post_attention_layernorm.weight"],
    "specialists.0.gate_up_proj.weight": [
        "transformer.mlp.gate_proj.weight",
        "transformer.mlp.up_proj.weight",
    ],
    "specialists.0.down_proj.weight": ["transformer.mlp.down_proj.weight"],
}


def save_speculators(
    drafter: PosSDrafter,
    folder: Path | str,
    *,
    target_architecture: str = "LlamaForCausalLM",
    speculative_tokens: int = 5,
) -> None:
    """Write a drafter of one layer as ``config.json`` and ``model.safetensors`` of the layout.

    Parameters
    ----------
    drafter : PosSDrafter
    folder : path
        Created if missing; what is there under these two names is replaced.
    target_architecture : str
        Class of the target, as its own ``config.json`` names it.
    speculative_tokens : int
        Drafted tokens per pass that the folder proposes to engines.

    Raises
    ------
    ValueError
        The layout has no place for this drafter.
    """
    config, folder = drafter.config, Path(folder)
    for name, holds in (
        (f"{config.layers} specialists", config.layers == 1),
        ("norms of queries and keys", not config.qk_norm),
        ("biases of queries, keys and values", not config.qkv_bias),
        ("a norm of features before fc (fc_norm)", not config.fc_norm),
        ("a norm of drafted features (norm_output)", not config.norm_output),
    ):
        if not holds:
            raise ValueError(f"the speculators layout of EAGLE has no place for {name}")
    layer = layer_fields(config)
    rope = dict(layer.pop("rope_parameters") or {})
    theta, rope_type = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    written = {
        "architectures": ["EagleSpeculator", _LAYER],
        "speculators_model_type": _TYPE,
        "speculators_config": {
            "algorithm": "eagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
            ],
            "verifier": {"name_or_path": config.target, "architectures": [target_architecture]},
        },
        "transformer_layer_architecture": _LAYER,
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": theta,
            "rope_scaling": None if rope_type == "default" else rope,
            **layer,
        },
        "layernorms": False,
        "fusion_bias": config.fc_bias,
        "torch_dtype": str(drafter.dtype).removeprefix("torch."),
    }
    weights = {}
    for name, weight in drafter.state_dict().items():
        theirs = _WEIGHTS[name]
        for part, own in zip(theirs, weight.chunk(len(theirs)), strict=True):
            weights[part] = own.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(written, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_speculators(folder: Path | str, *, dtype: torch.dtype | None = None) -> PosSDrafter:
    """Return the drafter of a folder in the layout.

    Parameters
    ----------
    folder : path
        With ``config.json`` and ``model.safetensors``.
    dtype : torch.dtype, optional
        By default as stored.

    Returns
    -------
    PosSDrafter

    Raises
    ------
    ValueError
        The folder is none of this layout, or holds a drafter that `PosSDrafter` is not.
    """
    folder = Path(folder)
    found = _read(folder)
    bias = found.config.fc_bias
    needed = {own: theirs for own, theirs in _WEIGHTS.items() if bias or own != "fc.bias"}
    weights, expected = found.weights, {name for theirs in needed.values() for name in theirs}
    if odd := expected ^ weights.keys():
        raise ValueError(
            f"the weights in {folder} do not fit its config.json: missing or unexpected "
            f"{', '.join(sorted(odd))}, by fusion_bias {bias}"
        )
    try:
        state = {own: torch.cat([weights[n] for n in theirs]) for own, theirs in needed.items()}
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit its config.json: {error}") from None
    return PosSDrafter.of_found(folder, found._replace(weights=state), dtype)


def _read(folder: Path) -> Found:
    """Return the drafter of a folder, its weights by their names in the layout."""
    given = read_config(folder)
    if (kind := given.get("speculators_model_type")) == "eagle3":
        raise ValueError(
            f"{folder} holds an EAGLE-3 drafter, which reads three layers of the target: "
            "Eagle3Drafter.from_pretrained loads it"
        )
    if kind != _TYPE:
        raise ValueError(
            f"{folder}: expected speculators_model_type {_TYPE!r} in config.json, got {kind!r}"
        )
    values = read_fields(folder, given, SPECULATORS_EAGLE)
    layer = values.under(_NESTED)
    llama = as_in_family(layer, layer["model_type"], _NESTED)
    config = PosSConfig(
        target=values["speculators_config.verifier.name_or_path"],
        fc_bias=values["fusion_bias"],
        **layer_fields(llama),
    )
    return Found(
        config, read_weights(folder), filled_sizes(values, SPECULATORS_EAGLE, llama, _NESTED)
    )
