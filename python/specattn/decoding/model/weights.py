"""Reads tensors out of a model's modules: what is not recognised is not guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specattn.blocks import Norm, Projection, Unrecognised, whole
from specattn.decoding.model.contents import Contents
from specattn.decoding.model.model import Model
from specattn.decoding.model.quantised import QuantisedLinear
from specattn.quantised import QuantisedWeight

# Their weight is what is added to 1.
_NORMS_OF_ONE = {
    "GemmaRMSNorm",
    "Gemma2RMSNorm",
    "Gemma3RMSNorm",
    "VaultGemmaRMSNorm",
    "Qwen3NextRMSNorm",
    "Qwen3_5RMSNorm",
    "Qwen3_5MoeRMSNorm",
}


class Reordered:
    """Weights in another order: copied once, and again where one has changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[list[Contents], Sequence[Any]]] = {}

    def dense(
        self, weight: torch.Tensor | QuantisedWeight, where: str, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a weight itself, or what its codes say."""
        if not isinstance(weight, QuantisedWeight):
            return weight
        (copy,) = self._kept(_tensors(weight), f"{where} {dtype}", lambda: [whole(weight, dtype)])
        return copy

    def transposed(self, x: torch.Tensor, where: str) -> torch.Tensor:
        """Return matrices [.., N, K] as [.., K, N], their rows contiguous."""
        (copy,) = self._kept([x], where, lambda: [x.mT.contiguous()])
        return copy

    def parts(self, module: Any, groups: int, sizes: Sequence[int], where: str) -> list[Projection]:
        """Return what a module interleaves: `sizes` rows of each projection, `groups` times."""
        weight, bias = read_projection(module, where)

        def parts(x: torch.Tensor | None, what: str) -> Sequence[Any]:
            name = f"{where} {what}"
            return [None] * len(sizes) if x is None else self._parts(x, groups, sizes, name)

        def parts_of_codes(few: QuantisedWeight) -> list[QuantisedWeight]:
            rows = few.in_rows()
            of_codes = rows.codes, rows.scale, rows.zero
            split: list[Sequence[Any]] = [
                [None] * len(sizes) if x is None else _copies(x, groups, sizes) for x in of_codes
            ]
            return [
                QuantisedWeight(codes, scale, zero, few.depth).laid()
                for codes, scale, zero in zip(*split, strict=True)
            ]

        if isinstance(weight, QuantisedWeight):
            few = weight
            what = f"{where} codes {sizes}"
            weights = self._kept(_tensors(few), what, lambda: parts_of_codes(few))
        else:
            weights = parts(weight, "weight")
        return list(map(Projection, weights, parts(bias, "bias")))

    def _parts(
        self, x: torch.Tensor, groups: int, sizes: Sequence[int], where: str
    ) -> Sequence[torch.Tensor]:
        return self._kept([x], f"{where} {sizes}", lambda: _copies(x, groups, sizes))

    def _kept(
        self, given: Sequence[torch.Tensor], what: str, copies: Callable[[], Sequence[Any]]
    ) -> Sequence[Any]:
        """Return what was copied of tensors, or their copies now."""
        key = what, given[0].dim()
        known, found = self._known.get(key, ([], ()))
        if len(known) != len(given) or not all(map(Contents.are_of, known, given)):
            known, found = self._known[key] = list(map(Contents, given)), copies()
        return found


def _tensors(few: QuantisedWeight) -> list[torch.Tensor]:
    """Return what weights of codes are made of."""
    return [x for x in (few.codes, few.scale, few.zero) if x is not None]


def _copies(x: torch.Tensor, groups: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the rows of each of `sizes`, which lie side by side in every group."""
    pieces = x.unflatten(0, (groups, -1)).split(list(sizes), 1)
    return [piece.flatten(0, 1).contiguous() for piece in pieces]


def reordered(model: PreTrainedModel) -> Reordered:
    """Return the copies of a model's weights that are needed in another order."""
    return Model.of(model).recall("reordered", Reordered)


def read_projection(module: Any, where: str) -> Projection:
    """Return weight and bias of a linear module, which may be of codes."""
    if type(module) is QuantisedLinear:
        return Projection(module.weight, module.bias)
    if type(module) is not nn.Linear:
        raise Unrecognised(f"{where}: a projection is a {type(module).__name__}")
    bias = None if module.bias is None else read_dense(module.bias, where)
    return Projection(read_dense(module.weight, where), bias)


def split_projection(module: Any, sizes: tuple[int, ...], where: str) -> tuple[Projection, ...]:
    """Return the projections that lie side by side in one module."""
    weight, bias = read_projection(module, where)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    return tuple(map(Projection, weight.split(sizes), biases))


def read_dense(parameter: torch.Tensor, where: str) -> torch.Tensor:
    """Return a parameter as a plain tensor, of a divided one this rank's part."""
    tensor = parameter.detach()
    if hasattr(tensor, "to_local"):  # this rank's part
        tensor = tensor.to_local()
    if type(tensor) is not torch.Tensor:
        raise Unrecognised(f"{where}: its weights are a {type(tensor).__name__}")
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise Unrecognised(f"{where}: rows of its weights are not contiguous")
    return tensor


def read_norm(module: Any, where: str) -> Norm:
    """Return an RMS norm, whose weight may be what is added to 1."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or eps is None:
        raise Unrecognised(f"{where}: a norm is a {type(module).__name__}")
    weight = module.weight.detach()
    return Norm(1 + weight if type(module).__name__ in _NORMS_OF_ONE else weight, float(eps))


def expect_children(module: nn.Module, expected: set[str], where: str) -> None:
    """Raise `Unrecognised` where a module is made of something else."""
    children = {name for name, _ in module.named_children()}
    if children != expected:
        odd = ", ".join(sorted(children ^ expected))
        raise Unrecognised(f"{where} differs from what is known in {odd}")
