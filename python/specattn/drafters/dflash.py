"""DFlash's drafter: a block of tokens in one pass, over features of several layers of the target.

A *target's features* are its residual stream behind some layers, side by side (arXiv 2602.06036)::

    c = norm(fc(features))                          of every token of the text
    x = embeddings of [root, mask, mask, ...]       at the root's position and those behind it
    x += attention(norm(x)) to all c and all x      layer by layer, each with its own keys
    x += swiglu(norm(x))
    logits of the token at row i = target's head (norm(x)), from row 1 on

The text's keys and values follow from c by a layer's projections alone. Rows of a block see each
other, later ones too: each predicts the token at its own position, whatever stands between. Those
of a *causal* head (JetFlow, arXiv 2606.18394) see no later ones; all else is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig

from specattn.drafters.drafter import Found
from specattn.drafters.fields import Values, read_fields
from specattn.drafters.folders import read_config, read_weights
from specattn.drafters.layer import DecoderLayer, LayerConfig, LayerDrafter, layer_fields
from specattn.drafters.layouts import (
    DFLASH,
    DFLASH_OWN,
    SPECULATORS_DFLASH,
    as_in_family,
    filled_sizes,
    windows,
)

_OURS, _THEIRS = "dflash", "DFlashDraftModel"
_NESTED, _CAUSAL = "transformer_layer_config.", ("causal_head", "causal", "is_causal")
# Of the target, frozen while the drafter learned: heads over part of the vocabulary are refused.
_COPIES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)


class DFlashConfig(LayerConfig):
    """What a DFlash drafter is made of; ``config.json`` of a folder that this package writes.

    Its fields beside these are `LayerConfig`'s.

    Attributes
    ----------
    layers : int
    feature_layers : list of int
        Behind how many of the target's layers its features are taken.
    block_size : int
        Rows of a block, the root's included; from 2 to 64.
    mask_token_id : int
        Whose embedding stands in the rows of tokens that are drafted.
    causal : bool or None
        Whether rows of a block see no later ones. None: nothing is said, and they see all.
    target_layers : int or None
        Of the target, where a folder says how many it has.

    Raises
    ------
    ValueError
        One of these is out of range, or the rope is not static.
    """

    model_type = _OURS
    shared = ("hidden_size", "vocab_size")

    layers: int = 1
    feature_layers: list[int] | None = None
    block_size: int = 16
    mask_token_id: int = 0
    causal: bool | None = None
    target_layers: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.feature_layers is None or min(self.feature_layers, default=0) < 1:
            raise ValueError(f"feature_layers must be positive, got {self.feature_layers}")
        if not 2 <= self.block_size <= 64:
            raise ValueError(f"block_size must be from 2 to 64, got {self.block_size}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id must be below vocab_size, {self.vocab_size}, got "
                f"{self.mask_token_id}"
            )

    def check_target(self, config: PreTrainedConfig) -> None:
        """Raise ValueError, with both numbers, unless it fits a target of this `config`."""
        super().check_target(config)
        deepest, depth = max(cast(Any, self.feature_layers)), config.num_hidden_layers
        self.check("deepest layer", deepest, depth, deepest <= depth)
        said = self.target_layers
        self.check("num_target_layers", said, depth, said in (None, depth))


class DFlashDrafter(LayerDrafter):
    """``fc``, its norm and the layers, named as in the authors' folders.

    Parameters
    ----------
    config : DFlashConfig
    """

    config: DFlashConfig
    config_class = DFlashConfig
    title = "DFlash"

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(cast(Any, config.feature_layers)) * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(width, eps)
        self.post_init()

    @classmethod
    def read(cls, folder: Path) -> Found:
        """Return what a folder holds of another's layout (`layouts`), or of our own."""
        return _read_folder(folder) or super().read(folder)


def _read_folder(folder: Path) -> Found | None:
    """Return what a folder of another's layout holds; None where it is of our own."""
    given = read_config(folder)
    if given.get("model_type") == _OURS or given.get("architectures") == ["DFlashDrafter"]:
        return None
    if nested := _in_speculators(folder, given):
        fields, prefix = SPECULATORS_DFLASH, _NESTED
    else:
        fields, prefix = DFLASH, ""
    values = read_fields(folder, given, fields)
    layer = values.under(prefix)
    qwen = as_in_family(layer, layer["model_type"], prefix)
    if any(windows(layer, layer["model_type"], qwen.num_hidden_layers, prefix)):
        raise ValueError(
            f"{folder}: layers of sliding_attention are not served: {prefix}layer_types "
            f"{layer['layer_types']}, sliding_window {layer['sliding_window']}, "
            f"use_sliding_window {layer['use_sliding_window']}"
        )
    for name, said in (
        ("draft_vocab_size", "vocab_size"),
        ("target_hidden_size", "hidden_size"),
        ("dflash_config.target_hidden_size", "hidden_size"),
    ):
        expected = getattr(qwen, said)
        if values.get(name) not in (None, expected):
            raise ValueError(
                f"{folder}: {name} must be {prefix}{said}, {expected}, got {values[name]}"
            )
    config = DFlashConfig(
        layers=qwen.num_hidden_layers,
        qkv_bias=layer["attention_bias"],
        qk_norm=True,
        **(_own_of_speculators(values) if nested else _own_of_authors(values)),
        **layer_fields(qwen),
    )
    weights = read_weights(folder)
    if nested:
        weights = _without_copies(folder, weights)
    return Found(config, weights, filled_sizes(values, fields, qwen, prefix))


def _in_speculators(folder: Path, given: dict[str, Any]) -> bool:
    """Whether a folder is of speculators' layout; ValueError: it holds no DFlash drafter."""
    if (kind := given.get("speculators_model_type")) == _OURS:
        return True
    if kind == "jetspec":
        raise ValueError(
            f"{folder} holds speculators' 'jetspec', whose blocks read the tokens before each row "
            "in place of masks, one pass a token, which is not done: speculators_model_type"
        )
    if kind is not None:
        raise ValueError(
            f"{folder} holds speculators' {kind!r}, not a DFlash drafter: speculators_model_type"
        )
    if given.get("transformer_layer_config") is not None:
        raise ValueError(
            f"{folder} holds a transformer_layer_config, not a DFlash drafter: it has no "
            "speculators_model_type"
        )
    if (kinds := given.get("architectures") or [given.get("model_type")]) != [_THEIRS]:
        what = kinds[0] if isinstance(kinds, list) else kinds
        raise ValueError(f"{folder} holds a model of {what!r}, not a DFlash drafter: architectures")
    return False


def _own_of_authors(values: Values) -> dict[str, Any]:
    """Return what a folder of the authors' layout says of a block."""

    def one(*names: str) -> Any:
        """Return a field of ``dflash_config``, which may stand at the top as well."""
        nested, field = f"dflash_config.{names[0]}", DFLASH_OWN[names[0]]
        found = values.one_of(*(f"{where}{n}" for n in names for where in ("dflash_config.", "")))
        if field.needed and found is None:
            raise ValueError(
                f"{values.folder}: {nested} is needed, {field.kind.said}, got nothing or null"
            )
        return found

    return {
        "target": "",
        "target_layers": values["num_target_layers"],
        "feature_layers": [number + 1 for number in one("target_layer_ids")],
        "block_size": one("block_size"),
        "mask_token_id": one("mask_token_id"),
        "causal": one(*_CAUSAL),
    }


def _own_of_speculators(values: Values) -> dict[str, Any]:
    """Return what a folder of speculators' layout says: its layers are named by their inputs."""
    return {
        "target": values["speculators_config.verifier.name_or_path"],
        "feature_layers": values["aux_hidden_state_layer_ids"],
        "block_size": values["block_size"],
        "mask_token_id": values["mask_token_id"],
        "causal": False,
    }


def _without_copies(folder: Path, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights that are the drafter's own, of a folder with the whole vocabulary."""
    offsets, known = weights.pop("d2t", None), weights.pop("t2d", None)
    if (offsets is not None and bool(offsets.any())) or (known is not None and not known.all()):
        raise ValueError(f"{folder}: d2t and t2d leave tokens out, and draft_vocab_size does not")
    return {name: weight for name, weight in weights.items() if name not in _COPIES}
