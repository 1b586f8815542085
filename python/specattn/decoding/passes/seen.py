"""Notices whether a module is still the one that recordings and CUDA graphs of it were made of."""

from __future__ import annotations

from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn

from specattn.decoding.model.structure import Modules

_PLAIN = {bool, int, float, str, type(None)}
_OF_ALL = vars(nn.Module()).keys() - {"training"}  # such as children: seen as what they hold
_space, _parameters, _buffers = map(attrgetter, ("__dict__", "_parameters", "_buffers"))
_form = attrgetter("shape", "dtype", "device")


class Seen:
    """What a recording of a module depends on, as it was; each run asks whether that stays.

    Matrices are read where they lie: their places and versions count, and a write that PyTorch does
    not count (``weight.data.copy_``) is read by a recording as by the module. Vectors may have been
    copied into another form: of these the values count. So do the modules themselves, their plain
    attributes, such as an adapter that is switched off, and their hooks.
    """

    def __init__(self, module: nn.Module):
        self._modules = Modules(module)
        modules = self._modules.now(module) or []
        self._sizes = _sizes(modules)
        own = [[name for name in space if name not in _OF_ALL] for space in map(_space, modules)]
        self._own = [itemgetter(*names, *names[:1]) for names in own]  # a tuple, of one name too
        values = self._values(modules)
        self._kinds = list(map(type, values))
        self._plain = [kind in _PLAIN for kind in self._kinds]
        self._lists = [kind in (list, tuple) for kind in self._kinds]
        self._facts = self._facts_of(values)
        self._tensors = _Tensors(modules)

    def is_of(self, module: nn.Module) -> bool:
        """Whether nothing that counts has changed."""
        modules = self._modules.now(module)
        if modules is None or _sizes(modules) != self._sizes:
            return False
        try:
            values = self._values(modules)
        except KeyError:  # another attribute took one's place
            return False
        return (
            list(map(type, values)) == self._kinds
            and self._facts_of(values) == self._facts
            and _Tensors(modules) == self._tensors
        )

    def _values(self, modules: list[nn.Module]) -> list[Any]:
        spaces = map(_space, modules)
        return [*chain.from_iterable(get(of) for get, of in zip(self._own, spaces, strict=True))]

    def _facts_of(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        lists = compress(values, self._lists)
        inside = [[(type(x), x if type(x) in _PLAIN else None) for x in one] for one in lists]
        return list(compress(values, self._plain)), inside


class _Tensors:
    """Places of modules' matrices, and values of their vectors by dtype and device."""

    def __init__(self, modules: list[nn.Module]):
        spaces = filter(None, chain(map(_parameters, modules), map(_buffers, modules)))
        tensors = [x for x in chain.from_iterable(map(dict.values, spaces)) if x is not None]
        matrices = [x for x in tensors if x.dim() > 1]
        self.places = (
            list(map(torch.Tensor.data_ptr, matrices)),
            list(map(torch.Tensor.stride, matrices)),
            list(map(_form, matrices)),
            [None if x.is_inference() else x._version for x in matrices],
        )
        few = dict[Any, list[torch.Tensor]]()
        for x in tensors:
            if x.dim() <= 1:
                few.setdefault((x.dtype, x.device), []).append(x if x.dim() else x[None])
        with torch.no_grad():
            self.values = {of: torch.cat(one) for of, one in few.items()}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Tensors)
            and self.places == other.places
            and self.values.keys() == other.values.keys()
            and all(map(torch.equal, self.values.values(), other.values.values()))
        )


def _sizes(modules: list[nn.Module]) -> list[int]:
    return list(map(len, map(_space, modules)))
