"""Notices whether a module is still the one that recordings and CUDA graphs of it were made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specattn.decoding.model.parts import changes_nothing

_PLAIN = {bool, int, float, str, type(None)}
_OURS = "_specattn"  # attributes that are set beside a model change nothing that it computes


class Seen:
    """What a recording of a module depends on, as it is now; equal while that stays.

    Matrices are read where they lie: their places and versions count, and a write that PyTorch does
    not count (``weight.data.copy_``) is read by a recording as by the module. Vectors may have been
    copied into another form: of these the values count. So do the modules themselves, their plain
    attributes, such as an adapter that is switched off, and their hooks.
    """

    def __init__(self, module: nn.Module):
        tensors = [*module.parameters(), *module.buffers()]
        self._facts = [_facts(one) for one in module.modules()]
        self._places = [_place(x) for x in tensors if x.dim() > 1]
        few = [x.detach().flatten().double() for x in tensors if x.dim() <= 1]
        self._values = torch.cat(few) if few else torch.empty(0)

    def __eq__(self, other: object) -> bool:
        """Whether nothing that counts has changed."""
        return (
            isinstance(other, Seen)
            and self._facts == other._facts
            and self._places == other._places
            and self._values.device == other._values.device
            and torch.equal(self._values, other._values)
        )

    __hash__ = None  # type: ignore[assignment]


def _facts(module: nn.Module) -> Any:
    own = vars(module)
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    plain = {name: x for name, x in own.items() if type(x) in _PLAIN and not name.startswith(_OURS)}
    lists = {name: tuple(x) for name, x in own.items() if type(x) in (list, tuple) and _plain(x)}
    changing = [id(hook) for hook in hooks if not changes_nothing(hook)]
    return id(module), type(module), id(own.get("forward")), changing, plain, lists


def _plain(x: Sequence[Any]) -> bool:
    return all(type(one) in _PLAIN for one in x)


def _place(x: torch.Tensor) -> Any:
    version = None if x.is_inference() else x._version
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, version
