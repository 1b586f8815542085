"""Decoding heads: drafters that predict further tokens from the hidden state of the last one.

With h_0 the target's final hidden state, normed, as its head g reads it, g(h_0) is the distribution
of the next token; head i predicts the distribution g(h_i) of the token i positions later::

    TokenSwift    h_i = h_{i-1} + W_i h_{i-1}              (arXiv 2502.18890, equation 1)
    Medusa        h_i = h_0 + silu(W_i h_0 + b_i)          (arXiv 2401.10774, section 2.1)

g is the target's own and not part of the drafter. In Medusa's paper each head has a g of its own
that starts as the target's; here both share it, as TokenSwift's paper has it for its baseline, so
that the two differ in nothing but how heads depend on each other. A new drafter has all W and b
zero: until it is trained, every head repeats the target's next-token distribution.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specattn.blocks import TORCH, Ops, projection
from specattn.drafters.drafter import DrafterConfig, TrainedDrafter

NUM_HEADS = 3
"""Heads in TokenSwift's paper: gamma, with gamma + 1 tokens drafted from one pass."""

_Heads = TypeVar("_Heads", bound="Heads")


class HeadsConfig(DrafterConfig):
    """Configuration of one or more heads; ``config.json`` of their folder. See `DrafterConfig`."""

    shared = ("hidden_size", "vocab_size")

    num_heads: int = NUM_HEADS
    hidden_size: int = 256
    vocab_size: int = 4096

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {self.num_heads}")


class Heads(TrainedDrafter):
    """What TokenSwift's and Medusa's heads have in common: a square matrix each.

    Parameters
    ----------
    config : HeadsConfig
    """

    config: HeadsConfig
    config_class: type[HeadsConfig]
    bias: ClassVar[bool]
    main_input_name = "features"

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        width = config.hidden_size
        self.linears = nn.ModuleList(
            nn.Linear(width, width, bias=self.bias) for _ in range(config.num_heads)
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)

    @classmethod
    def for_target(
        cls: type[_Heads], model: PreTrainedModel, *, target: str, num_heads: int = NUM_HEADS
    ) -> _Heads:
        """Return new heads for `model`, in float32: each repeats the next-token distribution.

        `target` is the name or path by which the drafter's folder will know the model.
        """
        shared = cls.config_class.shared_with(model.config)
        drafter = cls(cls.config_class(target=target, num_heads=num_heads, **shared))
        cast(Any, drafter).to(model.device)
        return drafter

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return what the target's head reads for each head, [..., num_heads, H].

        `features`, [..., H], are the target's last hidden state after its final norm; ValueError
        where they have another width.
        """
        if features.shape[-1] != (width := self.config.hidden_size):
            raise ValueError(f"features: expected [..., {width}], got {list(features.shape)}")
        return TORCH.stack(self.hidden(TORCH, features, self.config.num_heads))

    def hidden(self, ops: Ops, features: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return h_1, h_2, ..., each [..., H], of the first `count` heads."""
        raise NotImplementedError


class TokenSwiftConfig(HeadsConfig):
    """Of `TokenSwiftHeads`; see `HeadsConfig`."""

    model_type = "tokenswift"


class TokenSwiftHeads(Heads):
    """TokenSwift's linear heads, each reading what the one before it wrote.

    Parameters
    ----------
    config : TokenSwiftConfig
    """

    config_class = TokenSwiftConfig
    title = "TokenSwift"
    bias = False

    def hidden(self, ops: Ops, features: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return what each of the first `count` heads makes of the one before it."""
        hidden = [features]
        for layer in cast(Any, self.linears)[:count]:
            before = hidden[-1]
            hidden.append(ops.linear(before, projection(layer), residual=before, keep=True))
        return hidden[1:]


class MedusaConfig(HeadsConfig):
    """Of `MedusaHeads`; see `HeadsConfig`."""

    model_type = "medusa"


class MedusaHeads(Heads):
    """Medusa's heads, each independent of the others.

    Parameters
    ----------
    config : MedusaConfig
    """

    config_class = MedusaConfig
    title = "Medusa"
    bias = True

    def hidden(self, ops: Ops, features: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Return what each of the first `count` heads makes of the features."""
        how: Any = {"activation": "silu", "residual": features, "keep": True}
        layers = cast(Any, self.linears)[:count]
        return [ops.linear(features, projection(layer), **how) for layer in layers]
