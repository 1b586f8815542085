"""The settings that are measured: a method with its options, a context, a batch, a distribution."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from common.records import Record, label
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from specattn.decoding import METHODS, ContextualPenalty, Method, parse_method

from .peers.engines import ENGINES

PLAIN = "plain"
TRANSFORMERS = "transformers"
"""The peer in this process: ``model.generate`` with SDPA and its dynamic cache."""
PEERS = (TRANSFORMERS, *ENGINES)
"""All that others decode with; `ENGINES` are processes of their own."""


@dataclass(frozen=True)
class Shaping:
    """What shapes the distribution beside temperature; the defaults change nothing."""

    penalty: float = 1.0  # of `ContextualPenalty`; the only one that matters at temperature 0
    penalty_window: int = 1024
    top_p: float = 1.0
    min_p: float = 0.0
    eta: float = 0.0

    def processors(self, temperature: float) -> LogitsProcessorList:
        """Return the processors in transformers' order: penalty, temperature, truncation."""
        sampled = temperature > 0
        chosen = (
            (self.penalty != 1, lambda: ContextualPenalty(self.penalty_window, self.penalty)),
            (temperature not in (0.0, 1.0), lambda: TemperatureLogitsWarper(temperature)),
            (sampled and self.top_p < 1, lambda: TopPLogitsWarper(self.top_p)),
            (sampled and self.min_p > 0, lambda: MinPLogitsWarper(self.min_p)),
            (sampled and self.eta > 0, lambda: EtaLogitsWarper(self.eta)),
        )
        return LogitsProcessorList([make() for wanted, make in chosen if wanted])

    @property
    def options(self) -> dict[str, Any]:
        """What is not the default."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value != getattr(Shaping, name)}


UNSHAPED = Shaping()


@dataclass(frozen=True)
class Entry:
    """A method as it was asked for on the command line, such as ``vegas:gamma=4,ratio=0.05``."""

    name: str  # a key of `METHODS`, or one of `PEERS`
    options: dict[str, Any] = field(default_factory=dict)  # what the method is built with

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Read ``name:option=[4,16],...`` or a name; raises ValueError for what does not exist."""
        if text == TRANSFORMERS:
            return cls(text)
        try:
            return cls(*parse_method(text))
        except ValueError as error:
            raise ValueError(f"--method: {error}, or {TRANSFORMERS}") from None

    @classmethod
    def parse_peer(cls, text: str) -> Entry:
        """Read a peer in the same form; raises ValueError for one that is not here, too."""
        name, _, rest = text.partition(":")
        if name not in PEERS:
            raise ValueError(f"--peer: expected one of {', '.join(PEERS)}, got '{name}'")
        if name == TRANSFORMERS and rest:
            raise ValueError(f"--peer {name}: expected no option, got '{rest}'")
        if name == TRANSFORMERS:
            return cls(name)
        try:
            options = ENGINES[name].parse(rest)
            if reason := ENGINES[name].why_not():
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
        return label({"method": self.name, "settings": self.options})


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
