"""How a command line spells a method's options: each value by the type that its field declares."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_LARGEST = 2**31 - 1
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Option:
    """One option of a method; `takes` says in words what it takes."""

    def __init__(self, kind: Any, default: Any):
        union = get_origin(kind) in (Union, UnionType)
        kinds = get_args(kind) if union else (kind,)
        # A word beside a path is one.
        kinds = tuple(one for one in kinds if one is not str or Path not in kinds)
        readers = [found for one in kinds if (found := _reader(one)) is not None]
        self.default = default
        self._reads = [read for _, read in readers]
        words = list(dict.fromkeys(takes for takes, _ in readers))
        if NoneType in kinds:
            self._reads.insert(0, _none)
            words.append("none")
        self.takes = " or ".join(words)

    @property
    def default_text(self) -> str:
        """The default as one would write it."""
        if isinstance(self.default, tuple):
            return f"[{','.join(map(str, self.default))}]"
        lower = self.default is None or isinstance(self.default, bool)
        return str(self.default).lower() if lower else str(self.default)

    def read(self, text: str) -> Any:
        """Return the value that `text` spells; ValueError where it spells none."""
        for read in self._reads:
            try:
                return read(text)
            except OverflowError as error:
                raise ValueError(str(error)) from None
            except ValueError:
                continue
        raise ValueError(f"expected {self.takes}, got {text!r}")


def options_of(method: type) -> dict[str, Option]:
    """Return the options of a method, in the order of its fields."""
    kinds = get_type_hints(method)
    parameters = inspect.signature(method).parameters.values()
    return {one.name: Option(kinds.get(one.name, str), one.default) for one in parameters}


def _reader(kind: Any) -> tuple[str, Callable[[str], Any]] | None:
    """Return what a value of that type is called, and what reads it; None if no text spells it."""
    if get_origin(kind) is Literal:
        known = get_args(kind)
        return " or ".join(map(str, known)), lambda text: _one_of(text, known)
    if get_origin(kind) is tuple and Path in get_args(kind):
        return "a path, or paths in brackets, such as [a.txt,b.txt]", _paths
    if get_origin(kind) is tuple:
        return "integers in brackets, such as [4,16]", _integers
    return _READERS.get(kind)


def _one_of(text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise ValueError
    return text


def _none(text: str) -> None:
    if text.lower() != "none":
        raise ValueError


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError
    return _BOOLEANS[text.lower()]


def _integer(text: str) -> int:
    """Return an integer; OverflowError for one beyond all that methods count, in 32 bits."""
    if (number := int(text)) > _LARGEST:
        raise OverflowError(f"expected an integer up to {_LARGEST}, got {text!r}")
    return number


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


def _integers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\[.*\]", text):
        raise ValueError
    return tuple(map(_integer, text[1:-1].split(",")))


def _paths(text: str) -> tuple[str, ...]:
    if text == "[]":
        return ()
    inner = text[1:-1] if re.fullmatch(r"\[.*\]", text) else text
    return tuple(map(_path, inner.split(",")))


def _path(text: str) -> str:
    """Return a path; a shell does not expand a ``~`` in the middle of a word."""
    if not text:
        raise ValueError
    return os.path.expanduser(text)


_READERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    bool: ("true or false", _boolean),
    int: ("an integer", _integer),
    float: ("a number", _number),
    str: ("a word", str),
    Path: ("a path", _path),
}
