"""The methods by name, and how a command line writes one with its options."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

from specattn.decoding.longspec import LongSpec
from specattn.decoding.medusa import Medusa
from specattn.decoding.method import Method
from specattn.decoding.plain import Plain
from specattn.decoding.poss import PosS
from specattn.decoding.prompt_lookup import PromptLookup
from specattn.decoding.quest import Quest
from specattn.decoding.specextend import SpecExtend
from specattn.decoding.streaming import Streaming
from specattn.decoding.token_recycling import TokenRecycling
from specattn.decoding.tokenswift import TokenSwift
from specattn.decoding.triforce import TriForce
from specattn.decoding.vegas import Vegas

METHODS: dict[str, type[Method]] = {
    "plain": Plain,
    "vegas": Vegas,
    "longspec": LongSpec,
    "poss": PosS,
    "prompt_lookup": PromptLookup,
    "medusa": Medusa,
    "token_recycling": TokenRecycling,
    "tokenswift": TokenSwift,
    "streaming": Streaming,
    "quest": Quest,
    "specextend": SpecExtend,
    "triforce": TriForce,
}
"""Methods by name; ``METHODS[name](**options)`` builds one."""


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``name`` or ``name:option=value,...``, such as ``vegas:gamma=4,ratio=0.05``.

    Values are Python literals, lists ``[4,16]`` among them; what is none is a string, such as a
    path.

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
