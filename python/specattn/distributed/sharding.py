"""How the tokens of a text are sharded over ranks: whole blocks, round robin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Positions = TypeVar("Positions", int, torch.Tensor)


@dataclass(frozen=True)
class Sharding:
    """Which tokens one rank holds, and in which slots.

    Block n of the text, tokens ``n * block`` and on, belongs to rank ``n % ranks``. A rank keeps
    its blocks one behind the other, so what it holds of the first tokens of a text are its first
    slots, and a text that grows does so on every rank in turn.
    """

    rank: int
    ranks: int
    block: int  # tokens

    def is_mine(self, positions: Any) -> Any:
        """Return which tokens this rank holds."""
        return positions // self.block % self.ranks == self.rank

    def slots(self, positions: Positions) -> Positions:
        """Return where the rank that holds a token keeps it."""
        return positions // (self.block * self.ranks) * self.block + positions % self.block

    def positions(self, slots: Positions) -> Positions:
        """Return which tokens lie in this rank's slots."""
        turn = slots // self.block * self.ranks + self.rank
        return turn * self.block + slots % self.block

    def held(self, lengths: Positions) -> Positions:
        """Return how many of the first `lengths` tokens this rank holds."""
        turn = self.block * self.ranks
        rest = lengths % turn - self.rank * self.block
        rest = min(max(rest, 0), self.block) if isinstance(rest, int) else rest.clamp(0, self.block)
        return lengths // turn * self.block + rest

    def room(self, capacity: int) -> int:
        """Return how many slots every rank needs for texts of `capacity` tokens: whole blocks."""
        return -(-capacity // (self.block * self.ranks)) * self.block

    def in_order(self, parts: torch.Tensor, size: int, unit: int = 1) -> torch.Tensor:
        """Put entries of all ranks, [ranks, ..., n], in the order of the text: [..., size].

        There is one entry for every `unit` slots of a rank; `unit` divides `block`, and n is a
        multiple of ``block / unit``.
        """
        blocks = parts.unflatten(-1, (-1, self.block // unit))
        return blocks.movedim(0, -2).flatten(-3)[..., :size]
