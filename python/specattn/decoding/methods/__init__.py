"""The decoding methods, one file each, and how a command line spells one with its options.

A method joins `METHODS` by being defined with a name in a file of this folder.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from typing import Any

from specattn.decoding.method import METHODS

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``name`` or ``name:option=value,...``, such as ``vegas:gamma=4,ratio=0.05``.

    Values are Python literals, lists such as ``[4,16]`` among them; everything else is a string,
    such as a path.

    Raises
    ------
    ValueError
        The method or an option of it does not exist.
    """
    name, _, rest = text.partition(":")
    if name not in METHODS:
        raise ValueError(f"expected one of {', '.join(METHODS)}, got '{name}'")
    known, options = list(inspect.signature(METHODS[name]).parameters), {}
    for part in _split(rest):
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            expected = f"one of {', '.join(known)} as option=value" if known else "no option"
            raise ValueError(f"{name}: expected {expected}, got '{part}'")
        options[key] = _value(value)
    return name, options


def split_methods(text: str) -> list[str]:
    """Split ``plain,vegas:gamma=4,ratio=0.05,longspec`` where a new method begins."""
    methods: list[str] = []
    for part in _split(text):
        if methods and "=" in part.partition(":")[0]:
            methods[-1] += "," + part
        else:
            methods.append(part)
    return methods


def _split(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    return re.split(r",(?![^\[]*\])", text) if text else []


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
