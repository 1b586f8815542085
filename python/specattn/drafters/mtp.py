"""An MTP head of one's own: a layer as the target's last one, over pairs of token and feature.

What it computes is said where the heads that checkpoints hold are read (`specattn.decoding`): both
run by one function of `ops`. Its weights are called as DeepSeek-V3's checkpoint calls them.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from specattn.drafters.layer import DecoderLayer, LayerConfig, LayerDrafter


class MtpConfig(LayerConfig):
    """What an MTP head is made of; ``config.json`` of its folder. Fields are `LayerConfig`'s."""

    model_type = "mtp"
    shared = ("hidden_size", "vocab_size")


class MtpDrafter(LayerDrafter):
    """The weights of a head. Embedding and head of tokens are the target's and not part of it.

    Parameters
    ----------
    config : MtpConfig
    """

    config: MtpConfig
    config_class = MtpConfig
    title = "MTP"

    def __init__(self, config: MtpConfig):
        super().__init__(config)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        for name, part in DecoderLayer(config).named_children():  # checkpoints have it no deeper
            self.add_module(name, part)
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(width, eps)})
        self.post_init()

    @classmethod
    def for_target(cls, model: PreTrainedModel, *, target: str) -> MtpDrafter:
        """Return a new, random head for `model`, which its folder will know as `target`."""
        config = MtpConfig.for_target(model, target=target)
        return cast(Any, cls(config)).to(model.device)
