"""What training takes from the frozen target: its last layer's cache, and weights to start from."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

_RIDGE = 1e-3


@torch.no_grad()
def last_layer_cache(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys, rotated, and values [B, L, Hk, D] of the last layer for rows of text [B, L].

    Rows are causal and without padding; positions may jump within a row.
    """
    # With a cache at hand, transformers does not take a jump of the positions for a new text.
    layers: list[Any] = [_LastGiven() for _ in range(model.config.num_hidden_layers)]
    named = signature(model.base_model.forward).parameters
    name = "cache" if "cache" in named else "past_key_values"  # as transformers called it to 5.23
    model.base_model(input_ids, position_ids=position_ids, **{name: Cache(layers=layers)})
    keys, values = layers[-1].keys, layers[-1].values
    return keys.transpose(1, 2), values.transpose(1, 2)


def least_squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the map from rows x to rows y (`ridge_solution`)."""
    return ridge_solution(x.T @ x, x.T @ y)


def ridge_solution(square: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """Return the map from x to y, given x.T @ x and x.T @ y: columns are held back by size."""
    return torch.linalg.solve(square + _RIDGE * square.diagonal().diag(), cross).T


def copy_linears(own: nn.Linear, *theirs: nn.Linear) -> None:
    """Copy linear layers, side by side, into one."""
    own.weight.copy_(torch.cat([linear.weight for linear in theirs]))
    if own.bias is not None:
        own.bias.copy_(torch.cat([linear.bias for linear in theirs]))


def copy_output_and_norms(own: Any, attention: Any, scale: float = 1.0) -> None:
    """Copy an attention's output projection, times `scale`, and the head norms that `own` has."""
    own.o_proj.weight.copy_(scale * attention.o_proj.weight)
    copy_head_norms(own, attention)


def copy_head_norms(own: Any, attention: Any) -> None:
    """Copy the norms of queries and keys that `own` has."""
    for name in ("q_norm", "k_norm"):
        if getattr(own, name) is not None:
            getattr(own, name).weight.copy_(getattr(attention, name).weight)


def copy_mlp(own: Any, layer: Any, scale: float = 1.0) -> bool:
    """Copy a layer's MLP, its output times `scale`; return False for a mixture of experts."""
    if not isinstance(getattr(layer.mlp, "gate_proj", None), nn.Linear):
        return False
    copy_linears(own.gate_up_proj, layer.mlp.gate_proj, layer.mlp.up_proj)
    own.down_proj.weight.copy_(scale * layer.mlp.down_proj.weight)
    return True


class _LastGiven(CacheLayerMixin):
    """A layer's cache that returns the keys and values it is given, and keeps only those."""

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
