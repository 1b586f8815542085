"""What shapes the target's distribution beside temperature: truncation, contextual penalty."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from transformers import (
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from specattn.decoding import ContextualPenalty


@dataclass(frozen=True)
class Shaping:
    """Options of sampling; the defaults change nothing."""

    penalty: float = 1.0  # of `ContextualPenalty`; the only one that matters at temperature 0
    penalty_window: int = 1024
    top_p: float = 1.0
    min_p: float = 0.0
    eta: float = 0.0

    def processors(self, temperature: float) -> LogitsProcessorList:
        """Return the processors in transformers' order: penalty, temperature, truncation."""
        chosen: list[LogitsProcessor] = []
        if self.penalty != 1:
            chosen.append(ContextualPenalty(self.penalty_window, self.penalty))
        if temperature not in (0.0, 1.0):
            chosen.append(TemperatureLogitsWarper(temperature))
        if temperature > 0 and self.top_p < 1:
            chosen.append(TopPLogitsWarper(self.top_p))
        if temperature > 0 and self.min_p > 0:
            chosen.append(MinPLogitsWarper(self.min_p))
        if temperature > 0 and self.eta > 0:
            chosen.append(EtaLogitsWarper(self.eta))
        return LogitsProcessorList(chosen)

    @property
    def options(self) -> dict[str, Any]:
        """What is not the default."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value != getattr(Shaping, name)}


UNSHAPED = Shaping()
