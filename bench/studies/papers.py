"""The papers' figures, and their tables as suites: what is measured with theirs beside ours.

What is comparable is what does not depend on the machine: tokens per round, and how much faster
than plain decoding. Their tokens/s are shown where a table is about them; they are another model on
another machine.

``papers.json`` has a paper's figures by table, with their unit. Only what is printed as a number is
there: values that a plot alone shows are not guessed. Model names are the papers' short forms.
``suites.json`` lays the sections out; its text takes a paper's figures by ``{p[Table 1][...]}``. A
section has the fields of `Section`, its methods as on the command line, and:

* ``context``: "short", "all" that were asked for, or shares of the long one; a method may name
  ``{context}``. ``temperature``, ``batch`` and ``shaping`` are those of its `Group`; ``groups`` has
  several sets of them.
* ``*name`` is every method of that name that was given, ``*1name`` the first; ``given`` has methods
  that stand only where none was given.
* ``theirs``: rows as they are, or from ``tables``, side by side: the names that lead to a figure go
  into ``label`` and ``cells``; of a list, ``pick`` takes one figure, ``entries`` names each;
  ``where`` has sets that the names must meet; ``over`` adds the ratio to another method's.

TokenSwift is sampled as in its table 10 for LLaMA3.1-8b, and the partial cache has the prompt's
size, as there. Alpha is what a method accepts per round over the levels that its drafts have: the
paper's 4 here are 4 for TokenSwift and 3 for Medusa, whose first level is the root. Lengths are
fifths of what is generated, as the paper's 20K to 100K.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from decoding.cases import Entry, Group, Shaping, grid
from decoding.sections import Section

_PUBLISHED, _SUITES = (
    json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("papers.json", "suites.json")
)
GROUNDED = "grounded"
"""The suite that is no paper's."""
SUITES = tuple(_SUITES)

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

    def tokens(self, contexts: list[str | float]) -> list[int]:
        """Return the contexts that a section names."""
        if contexts == ["all"]:
            return list(self.contexts or (self.long,))
        return [self.short if one == "short" else int(self.long * one) for one in contexts]

    def methods(self, text: str) -> list[Entry]:
        """Return the method that a section names, with the options that it was given."""
        starred, name = text.startswith("*"), text.lstrip("*1")
        entry = Entry.parse(name)
        given = [one for one in self.entries if one.name == entry.name]
        if not starred:
            own = given[0].options if given else {}
            return [Entry(entry.name, {**_SIZES.get(entry.name, {}), **own, **entry.options})]
        family = (given or [Entry(entry.name)])[: 1 if text.startswith("*1") else None]
        return [Entry(one.name, {**one.options, **entry.options}) for one in family]


def published(paper: str, table: str) -> dict[str, Any]:
    """Return a table's figures without its unit."""
    return {name: value for name, value in _PUBLISHED[paper][table].items() if name != "unit"}


def suite(name: str, scale: Scale) -> list[Section]:
    """Return a paper's sections; raises ValueError where there is no such suite."""
    if name not in SUITES:
        raise ValueError(f"--suite: expected one of {', '.join(SUITES)}, got '{name}'")
    figures, shared = _PUBLISHED.get(name, {}), _SUITES[name]["shared"]
    return [_section({**shared, **one}, figures, scale) for one in _SUITES[name]["sections"]]


def _section(spec: dict[str, Any], figures: dict[str, Any], scale: Scale) -> Section:
    def filled(value: Any) -> Any:
        return value.format(p=figures) if isinstance(value, str) else value

    known = {one.name: filled(spec[one.name]) for one in fields(Section) if one.name in spec}
    known["groups"] = [
        group for part in spec.get("groups", [{}]) for group in _groups(spec | part, figures, scale)
    ]
    known["theirs"] = [
        row
        for one in spec.get("theirs", ())
        for row in (_rows(one, figures) if isinstance(one, dict) else [tuple(map(filled, one))])
    ]
    passes = int(known.get("passes", 0))
    lengths = tuple(known.get("lengths", ()))
    return Section(
        **known | {"passes": passes, "lengths": lengths, "source": figures.get("source", "")}
    )


def _groups(spec: dict[str, Any], figures: dict[str, Any], scale: Scale) -> Iterator[Group]:
    texts = spec.get("methods", spec.get("given", ()))
    for context in scale.tokens(spec["context"]) if texts else ():
        entries = [
            one for text in texts for one in scale.methods(text.format(p=figures, context=context))
        ]
        if "given" in spec:
            entries = list(scale.entries) or [Entry.parse(text) for text in texts]
        sampling = spec.get("temperature", [0.0]), spec.get("batch", [1])
        yield from grid(entries, [context], *sampling, Shaping(**spec.get("shaping", {})))


def _rows(spec: dict[str, Any], figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a paper that a section asks for."""
    tables = [reduce(getitem, path, figures) for path in spec["tables"]]
    for path in _leaves(tables[0]):
        found = [reduce(getitem, path, table) for table in tables]
        if "over" in spec:
            base = reduce(getitem, (spec["over"], *path[1:]), tables[0])
            found = [[*found[0], found[0][-1] / base[-1]]]
        if not all(set(one) & set(path) for one in spec.get("where", ())):
            continue
        if "entries" in spec:
            named = zip(spec["entries"], *found, strict=True)
            rows = [((*path, name), values) for name, *values in named]
        elif "pick" in spec:
            rows = [(path, [values[spec["pick"]] for values in found])]
        else:
            lists = [one if isinstance(one, list) else [one] for one in found]
            rows = [(path, [value for values in lists for value in values])]
        for names, values in rows:
            cells = [one.format(*names) for one in spec.get("cells", ())]
            label = spec["label"].format(*names) if "label" in spec else ", ".join(names)
            yield label, *cells, *(f"{value:.2f}" for value in values)


def _leaves(table: dict[str, Any], names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the names that lead to each figure of a table."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*names, name))
        elif name != "unit":
            yield *names, name
