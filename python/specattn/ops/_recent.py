"""Caches what was decided for tensors by their shapes, strides, dtypes and devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

try:  # what torch.compile guards its graphs with: one call compares all, in C++
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # it is no public name
    TensorGuards = None  # type: ignore[assignment, misc]

_MOST_SETS = 8  # of forms per key: beyond them a set is looked up as any other
_MOST_KEYS = 1024  # then all are forgotten


class _Nothing(torch.Tensor):
    """Stands where no tensor is given; its type tells it from every other."""


_NOTHINGS = [  # guards take none twice
    torch.empty(0, dtype=torch.float32, device="cpu").as_subclass(_Nothing) for _ in range(16)
]
_KNOWN_TYPES = {torch.Tensor, torch.nn.Parameter, _Nothing}


class Recent:
    """What was found for the last sets of tensors, by a key that also says how many they are.

    Forms are shapes, strides, dtypes, devices, and whether gradients are asked for. No tensor is
    kept.
    """

    def __init__(self) -> None:
        self.sets: dict[Any, list[tuple[Any, Any]]] = {}

    def recall(self, key: Any, tensors: Collection) -> Any:
        """Return what was found for tensors of these forms, or None."""
        if known := self.sets.get(key):
            given = [n if x is None else x for x, n in zip(tensors, _NOTHINGS)]  # noqa: B905
            for guards, found in known:
                if guards.check(*given):
                    return found
        return None

    def remember(self, key: Any, tensors: Sequence, found: Any) -> None:
        """Remember what was found, unless guards cannot tell it again.

        That is where a tensor comes twice, or is of a type of somebody else's.
        """
        given = [n if x is None else x for x, n in zip(tensors, _NOTHINGS)]  # noqa: B905
        types = {type(x) for x in given}
        if TensorGuards is None or len(set(map(id, given))) < len(tensors) or types - _KNOWN_TYPES:
            return
        if len(self.sets) >= _MOST_KEYS:
            self.sets.clear()
        guards = TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self.sets[key] = [(guards, found), *self.sets.get(key, ())][:_MOST_SETS]
