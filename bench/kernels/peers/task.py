"""What a peer of the attention primitives is given: the same tensors, and how to see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specattn import flash_attention

from ..inputs import Prefix

Peer = Callable[[], dict[str, torch.Tensor]]
KeysAndValues = Callable[[], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Attention:
    """Attention of T rows to keys of which the last T are the tree's.

    ``keys_and_values`` returns K and V [B, L + T, Hk, D] and does whatever has to be done for that
    in every call; ``first`` names it. ``mask`` bool [T, T] is the tree, None a causal chain.
    ``stored`` is the variant of a cache of 8 bits, whose numbers these are.
    ``prefix`` is the cache itself, with the tree's keys behind the prefix; None where there is no
    cache, and where only chosen tokens of it count.
    """

    q: torch.Tensor
    keys_and_values: KeysAndValues
    mask: torch.Tensor | None
    first: str = ""
    prefix: Prefix | None = None
    stored: str = ""

    @property
    def chain(self) -> bool:
        """Whether a causal mask says it all."""
        return self.mask is None

    def full_mask(self) -> torch.Tensor | None:
        """Return bool [T, L + T], or None where a single row sees everything."""
        rows, length = self.q.shape[1], self.keys_and_values()[0].shape[1]
        if rows == 1:
            return None
        full = torch.ones(rows, length, dtype=torch.bool, device=self.q.device)
        full[:, length - rows :] = self.tree_mask()
        return full

    def tree_mask(self) -> torch.Tensor:
        """Return bool [T, T], also for a chain."""
        if self.mask is not None:
            return self.mask
        rows = self.q.shape[1]
        return torch.ones(rows, rows, dtype=torch.bool, device=self.q.device).tril()

    def heads_first(self) -> list[torch.Tensor]:
        """Return K and V [B, Hk, L + T, D], as torch's attention takes them."""
        return [x.transpose(1, 2) for x in self.keys_and_values()]


class Family(NamedTuple):
    """A library: why it is no peer on a device, or None, and its calls for a task."""

    why_not: Callable[[torch.device], str | None]
    attention: Callable[[Attention], dict[str, Peer]]
    in_place: bool = False  # whether it reads pages where they lie, or keeps a cache of its own


def pack(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return [B, Hk, g * T, D]: all rows that share a KV head as rows of one product."""
    batch, rows, q_heads, head_dim = q.shape
    grouped = q.view(batch, rows, kv_heads, q_heads // kv_heads, head_dim)
    return grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)


def unpack(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [B, T, Hq, ...] of packed rows [B, Hk, g * T, ...]."""
    x = x.unflatten(2, (-1, rows))
    return x.movedim(3, 1).flatten(2, 3)


def needs(name: str, device: torch.device) -> str | None:
    """Return why a library for GPUs cannot be a peer here, or None.

    It is a module's name, or one of `flash_attention.MODULES`.
    """
    if device.type == "cuda":
        library = flash_attention.loaded(name)
        return library if isinstance(library, str) else None
    return "it runs on a GPU only"
