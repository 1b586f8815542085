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

GROUPS = 64, 32
"""Neighbours along K with one scale: the first that divides K, else a whole row."""


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


def quantised(model: PreTrainedModel, kind: str, asked: str = "quantize") -> PreTrainedModel:
    """Return a model with weights of fewer bits, which is made once and remembered with `model`.

    Linear layers named ``*_proj`` are rounded to the nearest in groups (`GROUPS`), those of 8 bits
    too; everything else, such as embedding, head and norms, is shared with `model`.

    Raises
    ------
    ValueError
        `kind` is unknown, or the model is on another device than a CPU, divided over ranks, has
        weights of as few bits already, some that are not finite, or no such layers. The message
        says that it was `asked` for.
    """
    if kind not in QUANTIZE:
        raise ValueError(f"{asked}: expected None or one of {[*QUANTIZE]}, got {kind!r}")
    model = text_model(model)
    if model.device.type != "cpu" or Model.ranks_of(model) is not None:
        where = model.device.type if model.device.type != "cpu" else "more than one rank"
        raise ValueError(f"{asked}={kind!r}: expected a model on one CPU, got one on {where}")
    made = Model.of(model)
    try:
        return made.recall(("quantised", kind), lambda: _rounded(model, QUANTIZE[kind]))
    except ValueError as error:
        raise ValueError(f"{asked}={kind!r}: {error}") from None


def _rounded(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    shared = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    layers = {n: module for n, module in model.named_modules() if n.endswith("_proj")}
    if not layers:
        raise ValueError(f"no layer of {type(model).__name__} is named *_proj")
    for name, module in layers.items():  # before any is rounded
        if isinstance(module, QuantisedLinear) and module.weight.bits <= bits:
            raise ValueError(f"{name} has weights of {module.weight.bits} bits already")
        if type(module) not in (nn.Linear, QuantisedLinear):
            raise ValueError(f"{name} is a {type(module).__name__}")
    for name, module in layers.items():
        own: Any = module.weight
        weight = own.dequantised(model.dtype) if isinstance(own, QuantisedWeight) else own.detach()
        size = next((size for size in GROUPS if weight.shape[1] % size == 0), None)
        try:
            few = quantise(weight, bits, size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        bias: Any = module.bias
        memo[id(module)] = QuantisedLinear(few, bias).eval()
    return copy.deepcopy(model, memo)
