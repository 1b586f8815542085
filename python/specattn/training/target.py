"""What a drafter learns from: a pass of the frozen target over whole rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin


@torch.no_grad()
def last_layer_cache(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the last layer of `model` caches for rows of text, causal and without padding.

    Parameters
    ----------
    model : PreTrainedModel
    input_ids : Tensor, int64 [B, L]
    position_ids : Tensor, int64 [B, L]
        Positions may jump; a row is one text all the same.

    Returns
    -------
    keys, values : Tensor [B, L, Hk, D]
        Keys rotated.
    """
    # With a cache at hand, transformers does not take a jump of the positions for a new text.
    layers: list[Any] = [_Passing() for _ in range(model.config.num_hidden_layers)]
    model.base_model(input_ids, position_ids=position_ids, past_key_values=Cache(layers=layers))
    keys, values = layers[-1].keys, layers[-1].values
    return keys.transpose(1, 2), values.transpose(1, 2)


class _Passing(CacheLayerMixin):
    """A layer's cache that hands through what it is given and remembers only that."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1
