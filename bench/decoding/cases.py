"""The settings that are measured: a method with its options, a context, a batch, a temperature."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.records import Record

from specattn.decoding import METHODS, Method, parse_method

from .peers.engines import ENGINES
from .shaping import UNSHAPED, Shaping

PLAIN = "plain"
TRANSFORMERS = "transformers"
"""The peer in this process: ``model.generate`` with SDPA and its dynamic cache."""
PEERS = (TRANSFORMERS, *ENGINES)
"""All that others decode with; `ENGINES` are processes of their own."""


@dataclass(frozen=True)
class Entry:
    """A method as it was asked for on the command line, such as ``vegas:gamma=4,ratio=0.05``."""

    name: str  # a key of `METHODS`, or one of `PEERS`
    options: dict[str, Any] = field(default_factory=dict)  # what the method is built with

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Read ``name`` or ``name:option=value,...``; lists are written ``[4,16]``.

        Raises ValueError where the method or an option of it does not exist.
        """
        if text == TRANSFORMERS:
            return cls(text)
        try:
            return cls(*parse_method(text))
        except ValueError as error:
            raise ValueError(f"--method: {error}, or {TRANSFORMERS}") from None

    @classmethod
    def parse_peer(cls, text: str) -> Entry:
        """Read ``name`` or ``name:option=value`` of a peer.

        Raises ValueError where there is no such peer or option, or where it is not installed.
        """
        name, _, rest = text.partition(":")
        if name not in PEERS:
            raise ValueError(f"--peer: expected one of {', '.join(PEERS)}, got '{name}'")
        engine = ENGINES.get(name)
        try:
            if engine is None:
                if rest:
                    raise ValueError(f"expected no option, got '{rest}'")
                return cls(name)
            options = engine.parse(rest)
            if reason := engine.why_not():
                raise ValueError(reason)
        except ValueError as error:
            raise ValueError(f"--peer {name}: {error}") from None
        return cls(name, options)

    @property
    def is_ours(self) -> bool:
        """Whether it is a method of this package, not a peer."""
        return self.name not in PEERS

    def build(self, defaults: Mapping[str, Mapping[str, Any]]) -> Method:
        """Return the method, with defaults by method where the entry says nothing else."""
        return METHODS[self.name](**{**defaults.get(self.name, {}), **self.options})

    @property
    def label(self) -> str:
        """Name and options, short enough for a table."""
        return " ".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])


@dataclass(frozen=True)
class Group:
    """What is measured side by side, so that it can be compared: same text, same place, in turn."""

    context: int
    batch: int
    temperature: float
    entries: tuple[Entry, ...]
    shaping: Shaping = UNSHAPED

    def record(self, entry: Entry) -> Record:
        """Return what is known of an entry's row before it is measured."""
        return {
            "kind": "row",
            "method": entry.name,
            "settings": entry.options,
            "context": self.context,
            "batch": self.batch,
            "temperature": self.temperature,
            "shaping": self.shaping.options,
        }


def grid(
    entries: Sequence[Entry],
    contexts: Iterable[int],
    temperatures: Iterable[float] = (0.0,),
    batches: Iterable[int] = (1,),
    shaping: Shaping = UNSHAPED,
) -> list[Group]:
    """Return one group per context, batch and temperature, each with all entries."""
    return [
        Group(context, batch, temperature, tuple(entries), shaping)
        for context, batch, temperature in itertools.product(contexts, batches, temperatures)
    ]


def row_key(record: dict[str, Any]) -> tuple:
    """Return what tells a row of a file from all others of the same run."""
    names = ("section", "method", "context", "batch", "temperature")
    options = tuple(sorted((k, str(v)) for k, v in record["settings"].items()))
    shaping = tuple(sorted(record.get("shaping", {}).items()))
    return (*(record[name] for name in names), options, shaping)
