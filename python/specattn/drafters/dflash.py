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
from transformers import PreTrainedConfig, Qwen3Config

from specattn.drafters.folders import read_config, read_weights
from specattn.drafters.layer import DecoderLayer, LayerConfig, LayerDrafter, layer_fields

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
            raise ValueError(f"mask_token_id: {self.mask_token_id} of {self.vocab_size} tokens")

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
    def from_pretrained(  # type: ignore[override]
        cls, folder: str | Path, **options: Any
    ) -> DFlashDrafter:
        """Load a drafter from a folder of the authors' layout, or our own.

        `options` may be a ``dtype``; by default it is as stored. Raises ValueError where the folder
        holds no such drafter, a successor of it, or weights that do not fit its configuration.
        """
        found = _read_config(Path(folder))
        if found is None:
            return cast(Any, super()).from_pretrained(folder, **options)
        return cls.of_weights(folder, found, read_weights(Path(folder)), options.get("dtype"))


def _read_config(folder: Path) -> DFlashConfig | None:
    """Return what a folder of the authors' layout says; None where it is of our own."""
    given = read_config(folder)
    if given.get("model_type") == _OURS:
        return None
    if (kinds := given.get("architectures") or [given.get("model_type")]) != [_THEIRS]:
        raise ValueError(f"{folder} holds a model of {kinds[0]!r}, not a DFlash drafter")
    own = {**given, **(given.get("dflash_config") or {})}
    for what, expected in (
        ("is_causal", (None, False)),
        ("conv_kernel_size", (None,)),
        ("output_multiplier", (None, 1.0)),
        ("final_logit_softcapping", (None, 0, 0.0)),
        ("input_embedding_scale", (None, 1.0)),
        ("hidden_act", (None, "silu")),
    ):
        if (found := own.get(what)) not in expected:
            raise ValueError(f"{folder}: {what} {found!r} is not served, but {expected[-1]!r}")
    if odd := set(given.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"{folder}: layers of {', '.join(sorted(odd))} are not served")
    qwen: Any = Qwen3Config(**given)  # fills in what a short config leaves out
    return DFlashConfig(
        target="",
        layers=qwen.num_hidden_layers,
        feature_layers=[number + 1 for number in own.get("target_layer_ids") or ()],
        block_size=own.get("block_size", 16),
        mask_token_id=own.get("mask_token_id", -1),
        qkv_bias=qwen.attention_bias,
        qk_norm=True,
        **layer_fields(qwen),
    )
