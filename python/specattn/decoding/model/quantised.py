"""Linear layers whose weights are codes of 8 or 4 bits, and models that are made of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specattn.decoding.model.model import Model
from specattn.decoding.model.text_model import text_model
from specattn.ops import linear_few_rows
from specattn.ops.linear_few_rows import MOST_ROWS
from specattn.quantised import QuantisedWeight, quantise

QUANTIZE = {"int8": 8, "int4": 4}
"""Bits that `quantised` rounds weights to, by name."""

GROUP = 64


class QuantisedLinear(nn.Module):
    """A linear layer by codes: few rows are multiplied with them, for others they are widened."""

    def __init__(self, few: QuantisedWeight, bias: torch.Tensor | None):
        super().__init__()
        self.in_features, self.out_features = few.depth, len(few)
        self.register_buffer("codes", few.codes)
        self.register_buffer("scale", few.scale)
        self.register_buffer("zero", few.zero)
        self.bias = bias

    @property
    def weight(self) -> QuantisedWeight:
        """Its weights."""
        codes: Any = self.codes
        return QuantisedWeight(codes, self.scale, self.zero, self.in_features)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of x [.., K] and the weights, [.., N]."""
        few, rows = self.weight, x.numel() // self.in_features
        if rows > MOST_ROWS or torch.is_grad_enabled():
            return linear(x, few.dequantised(x.dtype), self.bias)
        codes: Any = {"scale": few.scale, "zero": few.zero}
        flat = linear_few_rows(x.reshape(rows, -1), few.codes, self.bias, **codes)
        return flat.view(*x.shape[:-1], self.out_features)


def quantised(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Return a model with weights of fewer bits, which is made once and remembered with `model`.

    Linear layers named ``*_proj`` are rounded to the nearest in groups of 64 (`quantise`);
    everything else, such as embedding, head and norms, is shared with `model`.

    Raises
    ------
    ValueError
        `kind` is unknown, or the model is on another device than a CPU, divided over ranks, has
        such weights already, no such layers, or one whose groups are not whole.
    """
    if kind not in QUANTIZE:
        raise ValueError(f"quantize: expected None or one of {[*QUANTIZE]}, got {kind!r}")
    model = text_model(model)
    if model.device.type != "cpu" or Model.ranks_of(model) is not None:
        where = model.device.type if model.device.type != "cpu" else "more than one rank"
        raise ValueError(f"quantize={kind!r}: expected a model on one CPU, got one on {where}")
    if any(isinstance(module, QuantisedLinear) for module in model.modules()):
        raise ValueError(f"quantize={kind!r}: the model's weights are of codes already")
    return Model.of(model).recall(("quantised", kind), lambda: _rounded(model, kind))


def _rounded(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    shared = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    count = 0
    for name, module in model.named_modules():
        if not name.endswith("_proj"):
            continue
        if type(module) is not nn.Linear:
            raise ValueError(f"quantize={kind!r}: {name} is a {type(module).__name__}")
        try:
            few = quantise(module.weight.detach(), QUANTIZE[kind], GROUP)
        except ValueError as error:
            raise ValueError(f"quantize={kind!r}: {name}: {error}") from None
        memo[id(module)] = QuantisedLinear(few, module.bias).eval()
        count += 1
    if count == 0:
        raise ValueError(f"quantize={kind!r}: no layer of {type(model).__name__} is named *_proj")
    return copy.deepcopy(model, memo)
