"""Plain decoding: one token per pass of the target, in the same loop as everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specattn.decoding.engine.contract import Draft, DraftContext, Drafter
from specattn.decoding.engine.method import Method
from specattn.tree import Tree


@dataclass(frozen=True)
class Plain(Method, name="plain"):
    """Autoregressive decoding: a tree that is only a root. The baseline of every comparison."""

    @property
    def max_nodes(self) -> int:
        """The root alone."""
        return 1

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter that proposes nothing."""
        return _NoDraft(context.target.device)


class _NoDraft(Drafter):
    def __init__(self, device: torch.device):
        self.tree = Tree.chain(0, device=device)

    def propose(self, root: torch.Tensor) -> Draft:
        return Draft(self.tree, root[:, None])
