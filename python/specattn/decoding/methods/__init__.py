"""The decoding methods, one file each, and how a command line spells one with its options.

A method joins `METHODS` by being defined with a name in a file of this folder.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from specattn.choices import unknown
from specattn.decoding.engine.method import METHODS
from specattn.decoding.methods.spelling import options_of
from specattn.method_names import split_outside_brackets

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``name`` or ``name:option=value,...``, such as ``vegas:gamma=4,ratio=0.05``.

    The folder of a drafter may come first without its option's name: ``eagle3:drafters/mine``. A
    value is read as the type that the option declares: an integer, a number, ``true`` or
    ``false``, ``none``, integers in brackets such as ``[4,16]``, a word or a path.

    Parameters
    ----------
    text : str

    Returns
    -------
    name : str
        A key of `METHODS`.
    options : dict
        What ``METHODS[name]`` takes.

    Raises
    ------
    ValueError
        The method or an option of it does not exist, or the option cannot have that value.
    """
    name, colon, rest = text.partition(":")
    if name not in METHODS:
        raise ValueError(unknown(name, METHODS))
    known, given = options_of(METHODS[name]), dict[str, Any]()
    for number, part in enumerate(split_outside_brackets(rest) or [""] * bool(colon)):
        if part and not number and "=" not in part and "drafter" in known:
            part = f"drafter={part}"
        key, equals, value = part.partition("=")
        if not equals or not known:
            expected = f"one of {', '.join(known)} as option=value" if known else "no option"
            raise ValueError(f"{name}: expected {expected}, got '{part}'")
        if key not in known:
            raise ValueError(f"{name}: {unknown(key, known)}")
        if key in given:
            raise ValueError(f"{name}: {key} is given twice")
        try:
            given[key] = known[key].read(value)
        except ValueError as error:
            raise ValueError(f"{name}: {key}: {error}") from None
    return name, given
