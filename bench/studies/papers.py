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
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decoding.cases import Entry
from decoding.sections import Section

_PUBLISHED = json.loads((Path(__file__).parent / "papers.json").read_text(encoding="utf-8"))
GROUNDED = "grounded"
"""The suite that is no paper's."""
SUITES = (*_PUBLISHED, GROUNDED)

_SIZES: dict[str, dict[str, Any]] = {  # of a paper's drafts: a table is not of what pays here
    "longspec": {"widths": (4, 16, 16, 16, 16)},
    "poss": {"total_tokens": 60},
    "medusa": {"widths": (3, 3, 3)},
    "tokenswift": {"widths": (1, 3, 3, 3)},
    "token_recycling": {"nodes": 80},
}


@dataclass(frozen=True)
class Scale:
    """How large a suite is on this machine."""

    short: int  # tokens of a prompt where the paper's are short
    long: int
    entries: tuple[Entry, ...] = ()  # methods with this model's options, such as their drafter
    contexts: tuple[int, ...] = ()  # of a suite that measures several

    def entry(self, name: str, **options: Any) -> Entry:
        """Return a method with the options that it was given, and then these."""
        given = next((entry.options for entry in self.entries if entry.name == name), {})
        return Entry(name, {**_SIZES.get(name, {}), **given, **options})


def published(paper: str, table: str) -> dict[str, Any]:
    """Return a table's figures without its unit."""
    return {name: value for name, value in _PUBLISHED[paper][table].items() if name != "unit"}


def theirs(
    paper: str, table: str, *kinds: str, where: Callable[[Sequence[str]], bool] = bool
) -> list[tuple[str, ...]]:
    """Return a table as rows: the names that lead to figures, each after its kind, and these.

    ``where`` chooses among the names.
    """

    def walk(value: Any, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(inner, (*names, name))
        elif where(names):
            said = itertools.zip_longest(kinds[: len(names)], names, fillvalue="")
            figures = value if isinstance(value, list) else [value]
            yield (", ".join(map("".join, said)), *(f"{figure:.2f}" for figure in figures))

    return list(walk(published(paper, table), ()))


def suite(name: str, scale: Scale) -> list[Section]:
    """Return a paper's sections; raises ValueError where there is no such suite."""
    if name not in SUITES:
        raise ValueError(f"--suite: expected one of {', '.join(SUITES)}, got '{name}'")
    source = "" if name == GROUNDED else _PUBLISHED[name]["source"]
    found = importlib.import_module(f"studies.{name}").sections(scale)
    return [replace(section, source=source) for section in found]
