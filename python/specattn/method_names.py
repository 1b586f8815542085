"""How a command line names methods, told without importing them, which takes seconds."""

from __future__ import annotations

import re
from pathlib import Path

_DEFINITION = re.compile(r'^class \w+\(.*\bname="(\w+)"', re.MULTILINE)


def method_names() -> list[str]:
    """Return the keys of `specattn.decoding.METHODS`, as the methods' files define them."""
    files = sorted((Path(__file__).parent / "decoding/methods").glob("*.py"))
    return [name for file in files for name in _DEFINITION.findall(file.read_text("utf-8"))]


def split_methods(text: str) -> list[str]:
    """Split ``plain,vegas:gamma=4,ratio=0.05,longspec`` where a new method begins."""
    methods: list[str] = []
    for part in split_outside_brackets(text):
        if methods and "=" in part.partition(":")[0]:
            methods[-1] += "," + part
        else:
            methods.append(part)
    return methods


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    return re.split(r",(?![^\[]*\])", text) if text else []
