"""Linear layers whose weights are codes of 8 or 4 bits, and models that are made of them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specattn.decoding.model.contents import Contents
from specattn.decoding.model.model import Model
from specattn.decoding.model.structure import forward_of, structure_of, uncompiled
from specattn.decoding.model.text_model import check_device, text_model
from specattn.ops import linear_few_rows
from specattn.ops.linear_few_rows import MOST_ROWS
from specattn.peak_memory import available_bytes
from specattn.quantised import NOT_FINITE, QuantisedWeight, quantise, quantise_float8

QUANTIZE = {"int8": 8, "int4": 4, "fp8": 8}
"""Bits that `quantised` rounds weights to, by name."""

DEVICES = "cpu", "cuda"
"""Kinds of devices that multiply with codes."""

GROUPS = 64, 32
"""Neighbours along K with one scale: the first that divides K, else a whole row."""


def round_as(weight: torch.Tensor, kind: str) -> QuantisedWeight:
    """Return weights [N, K] rounded as `QUANTIZE` names it; ValueError: some are not finite."""
    if kind == "fp8":
        return quantise_float8(weight)
    size = next((size for size in GROUPS if weight.shape[1] % size == 0), None)
    return quantise(weight, QUANTIZE[kind], size)


def layers_to_round(model: nn.Module) -> dict[str, Any]:
    """Return a model's linear layers named ``*_proj``, by name.

    ValueError: there are none, or one is no linear layer.
    """
    layers = {n: module for n, module in model.named_modules() if n.endswith("_proj")}
    if not layers:
        raise ValueError(f"no layer of {type(model).__name__} is named *_proj")
    for name, module in layers.items():
        if type(module) not in (nn.Linear, QuantisedLinear):
            raise ValueError(f"{name} is a {type(module).__name__}")
    return layers


class QuantisedLinear(nn.Module):
    """A linear layer by codes: few rows are multiplied with them, for others they are widened."""

    def __init__(self, few: QuantisedWeight, bias: torch.Tensor | None):
        super().__init__()
        self.in_features, self.out_features = few.depth, len(few)
        few = few.laid()
        self.register_buffer("codes", few.codes)
        self.register_buffer("scale", few.scale)
        self.register_buffer("zero", few.zero)
        self.bias = bias

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply to all tensors, and lay weights as kernels of their device read them."""
        before = self.weight.codes
        super()._apply(fn, recurse)
        if self.weight.codes.dtype != before.dtype:  # floats are codes, whatever a model's type is
            self.register_buffer("codes", fn(before.view(torch.uint8)).view(before.dtype))
        few = self.weight.laid()
        self.codes, self.scale, self.zero = few.codes, few.scale, few.zero
        return self

    @property
    def weight(self) -> QuantisedWeight:
        """Its weights."""
        codes: Any = self.codes
        return QuantisedWeight(codes, self.scale, self.zero, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of x [.., K] and the weights, [.., N]."""
        few, rows = self.weight, x.numel() // self.in_features
        if rows > MOST_ROWS or torch.is_grad_enabled():
            return linear(x, few.dequantised(x.dtype), self.bias)
        codes: Any = {"scale": few.scale, "zero": few.zero}
        flat = linear_few_rows(x.reshape(rows, -1), few.codes, self.bias, **codes)
        return flat.view(*x.shape[:-1], self.out_features)


def quantised(
    model: PreTrainedModel, kind: str, asked: str = "quantize", *, in_place: bool = False
) -> PreTrainedModel:
    """Return a model with weights of fewer bits, which is remembered with `model`.

    Linear layers named ``*_proj`` are rounded to the nearest, integers in groups (`GROUPS`), those
    of published 8 bits too; everything else, such as embedding, head and norms, is shared with
    `model`. It is made again where `model` has changed since: its structure, one of its tensors, or
    what is in those that were rounded (`Contents`).

    `in_place` the layers of `model` itself are rounded, one after the other, and each weight is
    freed before the next is rounded. So they are, with a warning, where there is no memory for both
    and the model was asked for that shall be decoded: `asked` is "quantize". For a draft, which
    needs both, that is an error.

    Raises
    ------
    ValueError
        `kind` is unknown, or the model is on another device than a CPU or a GPU of CUDA, divided
        over ranks, has weights of as few bits already, some that are not finite, no such layers, or
        a ``forward`` that is a user's own. The message says that it was `asked` for.
    """
    if kind not in QUANTIZE:
        raise ValueError(f"{asked}: expected None or one of {[*QUANTIZE]}, got {kind!r}")
    model = text_model(model)
    check_device(model)
    served = model.device.type in DEVICES
    if not served or Model.ranks_of(model) is not None:
        where = "more than one rank" if served else model.device.type
        raise ValueError(
            f"{asked}={kind!r}: expected a model on one CPU or GPU, got one on {where}"
        )
    owner = Model.of(model)
    if owner.knows(("rounded in place", kind)):
        return model
    known = owner.recall("quantised", dict[str, _Remembered])
    number, tensors = structure_of(model).number, _tensors(model)
    remembered = known.get(kind)
    if remembered is None or not remembered.is_of(number, tensors):
        known.pop(kind, None)  # before another takes memory, too
        try:
            layers = _to_round(model, kind)
            short = None if in_place else _short(layers, kind, model.device)
            if short and asked != "quantize":
                raise ValueError(short)
            if in_place or short:
                del remembered, tensors
                _round_in_place(model, layers, kind)
                if short:
                    how = "the model's own layers were rounded in place"
                    warnings.warn(f"{asked}={kind!r}: {short}: {how}", stacklevel=3)
                return model
            few = _rounded(model, layers, tensors, kind)
        except ValueError as error:
            raise ValueError(f"{asked}={kind!r}: {error}") from None
        known[kind] = remembered = _Remembered(few, number, tensors)
    for module, own in zip(remembered.few.modules(), model.modules(), strict=True):
        module.training = own.training
    return remembered.few


def is_rounded(model: PreTrainedModel, kind: str) -> bool:
    """Whether `quantised` has made a model of a text model's weights as they are."""
    remembered = Model.of(model).recall("quantised", dict[str, _Remembered]).get(kind)
    if remembered is None:
        return False
    return remembered.is_of(structure_of(model).number, _tensors(model))


class _Remembered:
    """A rounded model, and what the one was like that it was made of."""

    def __init__(self, few: PreTrainedModel, number: int, tensors: list[Any]):
        self.few, self._number, self._ids = few, number, list(map(id, tensors))
        rounded = {id(x) for x in tensors} - {id(x) for x in _tensors(few)}
        self._contents = [Contents(x) if id(x) in rounded else None for x in tensors]

    def is_of(self, number: int, tensors: list[Any]) -> bool:
        """Whether a model of a structure of this number, with these tensors, is as it was."""
        if number != self._number or list(map(id, tensors)) != self._ids:
            return False
        pairs = zip(self._contents, tensors, strict=True)
        return all(contents is None or contents.are_of(x) for contents, x in pairs)


def _tensors(model: PreTrainedModel) -> list[Any]:
    """Return the parameters and buffers of a model."""
    spaces = [one for x in model.modules() for one in (x._parameters, x._buffers)]
    return [x for space in spaces for x in space.values() if x is not None]


def _to_round(model: PreTrainedModel, kind: str) -> dict[str, Any]:
    """Return the layers to round, by name; ValueError: they cannot be."""
    layers = layers_to_round(model)
    for name, module in model.named_modules():
        if forward_of(module) is not None:  # it may be of the modules that are not rounded
            raise ValueError(f"the forward of {name or 'the model'} was replaced")
    for name, module in layers.items():  # before any is rounded
        if isinstance(module, QuantisedLinear) and module.weight.bits <= QUANTIZE[kind]:
            raise ValueError(f"{name} has weights of {module.weight.bits} bits already")
    return layers


def _short(layers: dict[str, Any], kind: str, device: torch.device) -> str | None:
    """Return what is said where rounded layers do not fit into memory beside the others."""
    sizes = [module.in_features * module.out_features for module in layers.values()]
    scales = 2 / min(GROUPS)  # bytes for each weight
    needed, free = int(sum(sizes) * (QUANTIZE[kind] / 8 + scales)), available_bytes(device)
    if free is None or needed <= free:
        return None
    mega = [f"{size / 2**20:,.1f} MiB" for size in (needed, free)]
    return f"rounded weights take up to {mega[0]} beside the model's, and {device} has {mega[1]}"


def _round_layer(name: str, module: Any, kind: str, dtype: torch.dtype) -> QuantisedLinear:
    """Return a linear layer rounded; ValueError names it."""
    own = module.weight
    weight = own.dequantised(dtype) if isinstance(own, QuantisedWeight) else own.detach()
    try:
        few = round_as(weight, kind)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return QuantisedLinear(few, module.bias).eval()


def _rounded(
    model: PreTrainedModel, layers: dict[str, Any], tensors: list[Any], kind: str
) -> PreTrainedModel:
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    for name, module in layers.items():
        memo[id(module)] = _round_layer(name, module, kind, model.dtype)
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        uncompiled(module)
    return made


def _round_in_place(model: PreTrainedModel, layers: dict[str, Any], kind: str) -> None:
    """Round layers of a model, of which nothing else is to hold one; all, or ValueError and none.

    What was made of its weights is forgotten, for it holds some.
    """
    for name, layer in layers.items():
        own = layer.weight
        if isinstance(own, torch.Tensor) and not all(x.isfinite() for x in own.detach().aminmax()):
            raise ValueError(f"{name}: {NOT_FINITE}")
    owner, dtype, names = Model.of(model), model.dtype, [*layers]
    owner.take()
    owner.forget("reordered", "quantised", *(("rounded in place", one) for one in QUANTIZE))
    layers.clear()
    del layer, own
    for name in names:
        layer = model.get_submodule(name)
        few = _round_layer(name, layer, kind, dtype)
        few.training = layer.training
        model.set_submodule(name, few)
        del layer
    owner.recall(("rounded in place", kind), lambda: True)
