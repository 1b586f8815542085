"""The papers' figures, and their tables as suites: what is measured with theirs beside ours.

What is comparable is what does not depend on the machine: tokens per round, and how much faster
than plain decoding. Their tokens/s are shown where a table is about them; they are another model on
another machine.

A paper is its figures in ``papers.json``, by table and with their unit, and the module of its name,
whose `sections` lays them out. Only what is printed as a number is there: values that a plot alone
shows are not guessed. Model names are the papers' short forms.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoding.cases import Entry
from decoding.sections import Section

_PUBLISHED = json.loads((Path(__file__).parent / "papers.json").read_text(encoding="utf-8"))
SUITES = tuple(_PUBLISHED)


@dataclass(frozen=True)
class Scale:
    """How large a suite is on this machine.

    Attributes
    ----------
    short, long : int
        Tokens of a prompt where the paper's are short, and where they are long.
    entries : tuple of Entry
        Methods with the options of this model, such as where its drafter lies.
    """

    short: int
    long: int
    entries: tuple[Entry, ...] = ()

    def entry(self, name: str, **options: Any) -> Entry:
        """Return a method with the options that it was given, and then these."""
        given = next((entry.options for entry in self.entries if entry.name == name), {})
        return Entry(name, {**given, **options})


def published(paper: str, table: str) -> dict[str, Any]:
    """Return a table's figures without its unit."""
    return {name: value for name, value in _PUBLISHED[paper][table].items() if name != "unit"}


def suite(name: str, scale: Scale) -> list[Section]:
    """Return a paper's sections.

    Raises
    ------
    ValueError
        There is no such suite.
    """
    if name not in SUITES:
        raise ValueError(f"--suite: expected one of {', '.join(SUITES)}, got '{name}'")
    source = _PUBLISHED[name]["source"]
    found = importlib.import_module(f"studies.{name}").sections(scale)
    return [replace(section, source=source) for section in found]
