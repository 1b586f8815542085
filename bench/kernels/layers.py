"""The linear layers of a model that a verification pass multiplies with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specattn.planning import ModelShape


@dataclass(frozen=True)
class Layer:
    """Weights [outputs, depth]; `gated` twice, a gate and what it is multiplied with."""

    outputs: int
    depth: int
    gated: bool = False

    @property
    def products(self) -> int:
        """How many matrices of weights there are."""
        return 2 if self.gated else 1

    @property
    def elements(self) -> int:
        """Of all its weights."""
        return self.products * self.outputs * self.depth


LAYERS: dict[str, Callable[[ModelShape], Layer]] = {
    "qkv": lambda s: Layer((s.q_heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
    "output": lambda s: Layer(s.hidden, s.q_heads * s.head_dim),
    "gate and up": lambda s: Layer(s.intermediate, s.hidden, gated=True),
    "down": lambda s: Layer(s.hidden, s.intermediate),
    "head": lambda s: Layer(s.vocab, s.hidden),
}
