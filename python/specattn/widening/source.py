"""A checkpoint with its drafters, and what each becomes when it is widened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from specattn.decoding.model.checkpoint import load_causal_model
from specattn.drafters import (
    DFlashDrafter,
    Eagle3Drafter,
    LongSpecDrafter,
    MedusaHeads,
    MtpDrafter,
    PosSDrafter,
    TokenSwiftHeads,
    TrainedDrafter,
)
from specattn.widening.multiples import Multiples
from specattn.widening.weights import placed, widened, widened_config

_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_5_text")
_LAST = "o_proj", "out_proj", "down_proj"  # what attention, a state and an MLP write
_DRAFTERS: tuple[type[TrainedDrafter], ...] = (
    LongSpecDrafter,
    PosSDrafter,
    Eagle3Drafter,
    DFlashDrafter,
    MtpDrafter,
    TokenSwiftHeads,
    MedusaHeads,
)


@dataclass(frozen=True)
class Source:
    """A small model and what lies beside it, in float32.

    Attributes
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerFast
    drafters : dict
        By the name of their folders, which is that of their method.
    """

    model: PreTrainedModel
    tokenizer: Any
    drafters: dict[str, TrainedDrafter]

    @classmethod
    def load(cls, folder: Path, tokenizer: Any) -> Source:
        """Load a folder; ValueError where it holds no model that can be widened."""
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if (family := config.model_type) not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise ValueError(f"{folder} is of type {family!r}; only {known} can be widened")
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ValueError(f"{folder} has layers of sliding attention, which are not widened")
        if getattr(config, "quantization_config", None):
            raise ValueError(f"{folder} is quantised: its weights cannot be repeated exactly")
        found = {one.config_class.model_type: one for one in _DRAFTERS}
        drafters = {
            name: kind.from_pretrained(folder / name, dtype=torch.float32).eval()
            for name, kind in found.items()
            if (folder / name).is_dir()
        }
        return cls(load_causal_model(folder, torch.float32), tokenizer, drafters)

    def empty(self, times: Multiples) -> PreTrainedModel:
        """Return the widened model without its weights."""
        wide = _empty(self.model, widened_config(self.model.config, times))
        wide.base_model.rotary_emb = deepcopy(self.model.base_model.rotary_emb)
        return wide

    def parts(self, times: Multiples) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the widened weights by name: of each layer, then the rest.

        Between the source's layers are copies that write zeros, and so change nothing at the cost
        of a layer.
        """
        config, weights = self.model.config, self.model.state_dict()
        for layer, (like, kept) in enumerate(placed(config, times)):
            prefix = f"model.layers.{like}."
            part = {
                f"model.layers.{layer}.{name.removeprefix(prefix)}": widened(
                    name, weight, config, times
                )
                for name, weight in weights.items()
                if name.startswith(prefix)
            }
            if not kept:
                for name in part:
                    if any(last in name for last in _LAST):
                        part[name] = torch.zeros_like(part[name])
            yield part
        left_out = widened_config(config, times).tie_word_embeddings
        yield {
            name: widened(name, weight, config, times)
            for name, weight in weights.items()
            if not name.startswith("model.layers.") and not (left_out and name == "lm_head.weight")
        }

    def wide_drafter(self, name: str, times: Multiples, target: str) -> Any:
        """Return a widened drafter for the widened `target`; ValueError where it cannot be."""
        drafter: Any = self.drafters[name]
        config = widened_config(drafter.config, times)
        config.target = target
        if isinstance(drafter, Eagle3Drafter):
            config.feature_layers = self._moved(drafter.config.layers_of(self.model.config), times)
        if isinstance(drafter, DFlashDrafter):
            config.feature_layers = self._moved(drafter.config.feature_layers or (), times)
            config.target_layers = None  # the source's
        wide = _empty(drafter, config)
        if hasattr(drafter, "rotary_emb"):
            wide.rotary_emb = deepcopy(drafter.rotary_emb)
        weights = {
            key: widened(key, one, drafter.config, times) if one.is_floating_point() else one
            for key, one in drafter.state_dict().items()
        }
        wide.load_state_dict(weights, assign=True)
        return wide

    def _moved(self, layers: Sequence[int], times: Multiples) -> list[int]:
        """Return behind how many widened layers the stream is that behind so many of the source."""
        there = {n: at for at, (n, kept) in enumerate(placed(self.model.config, times), 1) if kept}
        return [there[n - 1] for n in layers]


def _empty(model: PreTrainedModel, config: PreTrainedConfig) -> Any:
    """Return a model like another one, but for `config`, without weights and rope."""
    with torch.device("meta"):
        return type(model)(config).eval()
