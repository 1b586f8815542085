"""Plain decoding: one token per pass of the target, in the same loop as everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specattn.decoding.loop import Draft, Drafter
from specattn.decoding.method import Method
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.target import Target
from specattn.tree import Tree


@dataclass(frozen=True)
class Plain(Method):
    """Autoregressive decoding: a tree that is only a root. The baseline of every comparison."""

    @property
    def max_nodes(self) -> int:
        """The root alone."""
        return 1

    def start(self, target: Target, law: TargetLaw, generator: torch.Generator | None) -> Drafter:
        """Return a drafter that proposes nothing."""
        return _NoDraft(target.device)


class _NoDraft(Drafter):
    def __init__(self, device: torch.device):
        self.tree = Tree.chain(0, device=device)

    def propose(self, root: torch.Tensor) -> Draft:
        return Draft(self.tree, root[:, None])
