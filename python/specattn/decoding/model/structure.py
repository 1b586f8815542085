"""A model's structure: its modules, what runs when they are called, and its configuration.

What was proved of a model holds for the structure it had then. Weights are no part of it: passes
read them as they are. Each run asks, so asking must cost next to nothing: a comparison with what
was seen last, by functions of C alone. Nothing that is kept here keeps a model alive.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from specattn.decoding.model.model import Model

F = TypeVar("F", bound=Callable[..., Any])

_OURS = "specattn_ours"  # set on functions
_COMPILED = "_torchdynamo_orig_callable"  # what torch.compile made a function of
_DIVIDES = "transformers.distributed."  # where it divides a model over ranks, by ``forward``
_MOST = 8  # structures of one model that are known again, such as with a hook and without
_PLAIN = (bool, int, float, str, list, tuple, dict, torch.dtype, type(None))
_numbers = count()
_children, _space = attrgetter("_modules"), attrgetter("__dict__")
_trains = attrgetter("training")


@dataclass(frozen=True)
class Structure:
    """One of the structures that models have had.

    Attributes
    ----------
    number : int
        Of this model no other structure has it, nor of another model.
    replaced : str or None
        In words, what a user has put beside or in place of some module's own ``forward``.
    at_ends : bool
        Whether that concerns the model itself, its base, or modules of all kinds.
    at_top : bool
        Whether it concerns the model itself, which passes must then call, not base and head alone.
    in_training : bool
        Whether any module is in training mode, which changes no number.
    """

    number: int
    replaced: str | None
    at_ends: bool
    at_top: bool
    in_training: bool


def structure_of(model: PreTrainedModel) -> Structure:
    """Return the structure that a model has now, with the number of an equal one that it had."""
    known: list[_Seen] = Model.of(model).recall("structures", list)
    for seen in tuple(known):
        if (now := seen.now(model)) is not None:
            break
    else:
        seen, now = _Seen(model), None
    if known[:1] != [seen]:
        known[:] = [seen, *(other for other in known if other is not seen)][:_MOST]
    return seen.structure if now is None else now


def ours(function: F) -> F:
    """Mark a hook, or a ``forward``, that changes nothing of calls without a plan of ours."""
    setattr(function, _OURS, True)
    return function


def is_replaced(module: nn.Module) -> bool:
    """Whether a user's function runs beside or in place of a module's own ``forward``."""
    return bool(hooks_of(module)) or forward_of(module) is not None


def uncompiled(module: Any) -> Any:
    """Let a copy of a module run its class' ``forward``, not one that is of the original."""
    for name in ("forward", "_compiled_call_impl"):
        vars(module).pop(name, None)
    return module


def bare(module: Any, **changed: Any) -> Any:
    """Return a module of the same parts, without hooks and with its class' ``forward``."""
    found = uncompiled(copy.copy(module))
    space = vars(found)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        space[name] = type(space[name])()
    space["_modules"] = {**module._modules, **changed}
    return found


def code_of(model: PreTrainedModel) -> list[list[str]]:
    """Return what a model's modules run, in words that are the same in every process."""
    kinds = {name: type(module) for name, module in model.named_modules()}
    found = [[name, kind.__module__, kind.__qualname__] for name, kind in kinds.items()]
    for space, names in _namespaces(kinds.values()):
        codes = [(name, getattr(space[name], "__code__", None)) for name in names]
        found += [
            [name, code.co_filename, str(code.co_firstlineno), code.co_code.hex()]
            for name, code in codes
            if code is not None
        ]
    return found


class Modules:
    """A module and all inside it as they were, to be compared with what they are now."""

    def __init__(self, root: nn.Module):
        modules = [root]
        for module in modules:  # which grows meanwhile
            modules += [child for child in module._modules.values() if child is not None]
        self._parents = [ref(module) for module in modules if module._modules]
        self._ids, self.kinds = list(map(id, modules)), list(map(type, modules))
        self._changes = _changes(modules)

    def now(self, root: nn.Module) -> list[nn.Module] | None:
        """Return them if they are the same, and the same functions beside them or in their place.

        A parent stands in front of what is in it.
        """
        parents = [parent() for parent in self._parents]
        if None in parents:
            return None
        inside = chain.from_iterable(map(dict.values, map(_children, parents)))
        modules = [root, *(module for module in inside if module is not None)]
        same = (
            list(map(id, modules)) == self._ids
            and list(map(type, modules)) == self.kinds
            and _changes(modules) == self._changes
        )
        return modules if same else None


class _Seen:
    """A model as it was seen, to be compared with what it is now."""

    def __init__(self, model: PreTrainedModel):
        self.modules = Modules(model)
        self.spaces = _namespaces(self.modules.kinds)
        self.code = self._code()
        self.settings = _settings(model)
        named = dict(model.named_modules())
        replaced = next(filter(None, (_in_words(*item) for item in named.items())), None)
        everywhere = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
        at_top = bool(everywhere) or is_replaced(model)
        self.structure = Structure(
            number=next(_numbers),
            replaced="all modules have global forward hooks" if everywhere else replaced,
            at_ends=at_top or is_replaced(model.base_model),
            at_top=at_top,
            in_training=_any_trains(model.modules()),
        )

    def now(self, model: PreTrainedModel) -> Structure | None:
        """Return the structure if a model has it now."""
        modules = self.modules.now(model)
        if modules is None or self._code() != self.code or not _unchanged(model, self.settings):
            return None
        if (trains := _any_trains(modules)) == self.structure.in_training:
            return self.structure
        return replace(self.structure, in_training=trains)

    def _code(self) -> list[list[Any]]:
        return [list(map(_reference, map(space.get, names))) for space, names in self.spaces]


def _changes(modules: list[Any]) -> list[Any]:
    """Return the functions that a user has put beside or in place of modules' own, and where."""
    odd = [
        n
        for n, x in enumerate(map(_space, modules))
        if x["_forward_hooks"] or x["_forward_pre_hooks"] or "forward" in x
    ]
    found: list[Any] = []
    for n in odd:
        hooks, forward = hooks_of(modules[n]), forward_of(modules[n])
        if hooks or forward is not None:
            found += n, *map(_reference, hooks), _reference(forward)
    everywhere = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    found += [_reference(hook) for hooks in everywhere for hook in hooks.values()]
    return found


def _any_trains(modules: Iterable[Any]) -> bool:
    return any(map(_trains, modules))


def hooks_of(module: nn.Module) -> list[Any]:
    """Return a module's hooks that are not ours."""
    hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
    return [hook for hook in hooks if not getattr(hook, _OURS, False)]


def forward_of(module: nn.Module) -> Any:
    """Return what a user has put in place of a module's ``forward``; compiled, it is its own."""
    forward = vars(module).get("forward")
    while (inner := getattr(forward, _COMPILED, None)) is not None:
        forward = inner
    if isinstance(forward, MethodType) and forward.__self__ is module:
        function = forward.__func__
        if function is type(module).forward or getattr(function, _OURS, False):
            return None
    if (getattr(forward, "__module__", None) or "").startswith(_DIVIDES):
        return None
    return forward


def _in_words(name: str, module: nn.Module) -> str | None:
    name = name or "the model"
    if hooks_of(module):
        return f"{name} has forward hooks"
    return None if forward_of(module) is None else f"the forward of {name} was replaced"


def _namespaces(kinds: Iterable[type]) -> list[tuple[Mapping[str, Any], list[str]]]:
    """Return where the functions are that modules of some classes run, and their names there."""
    classes = list(dict.fromkeys(kinds))
    bases = list(dict.fromkeys(base for kind in classes for base in kind.__mro__[:-1]))
    found: list[tuple[Mapping[str, Any], list[str]]] = []
    for kind in bases:
        space: Mapping[str, Any] = vars(kind)
        if kind in classes and kind is not nn.Module:
            found.append((space, [name for name, x in space.items() if type(x) is FunctionType]))
        else:  # of what all models inherit: the many other functions are not called
            found.append((space, [name for name in _CALLS if name in space]))
    files = dict.fromkeys(kind.__module__ for kind in classes)
    for file in files:
        if not file.startswith("torch.") and file in sys.modules:
            space = vars(sys.modules[file])
            found.append((space, [name for name, x in space.items() if type(x) is FunctionType]))
    return found


_CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")


def _settings(model: PreTrainedModel) -> tuple[int, dict[str, Any]]:
    """Return how many settings a model's configuration has, and those that can be compared."""
    own = vars(model.config)
    plain = {
        name: copy.deepcopy(value)
        for name, value in own.items()
        if isinstance(value, _PLAIN) and name[:1] != "_"
    }
    return len(own), {name: value for name, value in plain.items() if value == own[name]}


def _unchanged(model: PreTrainedModel, settings: tuple[int, dict[str, Any]]) -> bool:
    own, (count, plain) = vars(model.config), settings
    return len(own) == count and list(map(own.get, plain)) == list(plain.values())


def _reference(function: Any) -> Any:
    """Return a weak reference, equal to others of the same function that lives."""
    try:
        return ref(function)
    except TypeError:  # such as None
        return function
