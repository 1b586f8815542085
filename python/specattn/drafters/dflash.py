"""DFlash's drafter: a block of tokens in one pass, over features of several layers of the target.

A *target's features* are its residual stream behind some layers, side by side (arXiv 2602.06036)::

    c = norm(fc(features))                          of every token of the text
    x = embeddings of [root, mask, mask, ...]       at the root's position and those behind it
    x += attention(norm(x)) to all c and all x      layer by layer, each with its own keys
    x += swiglu(norm(x))
    logits of the token at row i = target's head (norm(x)), from row 1 on

The text's keys and values follow from c by a layer's projections alone. Rows of a block see each
other, later ones too: each predicts the token at its own position, whatever stands between.
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
from specattn.drafters.layouts import DFLASH, DFLASH_OWN, as_in_family, filled_sizes, windows

_OURS, _THEIRS = "dflash", "DFlashDraftModel"


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
        """Return what a folder holds of the authors' layout (`layouts`), or of our own."""
        return _read_folder(folder) or super().read(folder)


def _read_folder(folder: Path) -> Found | None:
    """Return what a folder of the authors' layout holds; None where it is of our own."""
    given = read_config(folder)
    if given.get("model_type") == _OURS or given.get("architectures") == ["DFlashDrafter"]:
        return None
    if (kinds := given.get("architectures") or [given.get("model_type")]) != [_THEIRS]:
        what = kinds[0] if isinstance(kinds, list) else kinds
        raise ValueError(f"{folder} holds a model of {what!r}, not a DFlash drafter: architectures")
    values = read_fields(folder, given, DFLASH)
    own = {name: _own(values, name) for name in DFLASH_OWN}
    qwen = as_in_family(values, values["model_type"])
    found = windows(values, values["model_type"], qwen.num_hidden_layers)
    if any(found):
        raise ValueError(
            f"{folder}: layers of sliding_attention are not served: layer_types "
            f"{values['layer_types']}, sliding_window {values['sliding_window']}, "
            f"use_sliding_window {values['use_sliding_window']}"
        )
    if values["draft_vocab_size"] not in (None, qwen.vocab_size):
        raise ValueError(
            f"{folder}: draft_vocab_size must be vocab_size, {qwen.vocab_size}, got "
            f"{values['draft_vocab_size']}"
        )
    config = DFlashConfig(
        target="",
        layers=qwen.num_hidden_layers,
        feature_layers=[number + 1 for number in own["target_layer_ids"]],
        block_size=own["block_size"],
        mask_token_id=own["mask_token_id"],
        qkv_bias=values["attention_bias"],
        qk_norm=True,
        **layer_fields(qwen),
    )
    return Found(config, read_weights(folder), filled_sizes(values, DFLASH, qwen))


def _own(values: Values, name: str) -> Any:
    """Return a field of ``dflash_config``, which may stand at the top as well."""
    nested, field = f"dflash_config.{name}", DFLASH_OWN[name]
    found = values.one_of(nested, name)
    if field.needed and found is None:
        raise ValueError(
            f"{values.folder}: {nested} is needed, {field.kind.said}, got nothing or null"
        )
    return found
