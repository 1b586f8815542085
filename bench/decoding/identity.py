"""Hold greedy text against plain decoding's, and find the ties that rounding decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specattn.decoding import Target
from specattn.decoding.engine.loop import CHUNK_SIZE
from specattn.tree import Tree


@dataclass(frozen=True)
class Difference:
    """The first token of a request that is not plain decoding's.

    The gap is the logit of plain's token less that of the other one, as plain decoding computes
    them. The noise is what rounding alone can do: the largest difference between the logits here
    computed token by token, as plain decoding does, and in one pass, as verification does.
    """

    text: int
    request: int
    position: int  # in the new tokens
    gap: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding can turn the choice round: each of two logits moves by the noise."""
        return abs(self.gap) <= 2 * self.noise


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which the texts differ, None if one begins with the other."""
    pairs = enumerate(zip(plain, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), None)


@torch.no_grad()
def explain(
    make: Callable[[int, int], Target],
    prompt: torch.Tensor,
    plain: Sequence[int],
    other: Sequence[int],
    position: int,
) -> tuple[float, float]:
    """Return gap and noise (`Difference`) where two texts part, by computing the place again.

    ``make(requests, capacity)`` returns an empty target.
    """
    common = torch.tensor([*prompt[-1:].tolist(), *plain[:position]])[None]
    logits = []
    for rows in (1, common.shape[1]):
        target = make(1, len(prompt) + position + 1)
        common = common.to(target.device)
        with target.in_use():
            target.prefill([prompt[:-1]], CHUNK_SIZE)
            for part in common.split(rows, 1):
                tree = Tree.chain(part.shape[1] - 1, device=target.device)
                last = target.verify(tree, part).logits[0, -1].float()
                counts = torch.tensor([part.shape[1] - 1], device=target.device)
                target.cache.commit(counts[:, None], counts, in_place=True)
        logits.append(last)
    one_by_one, at_once = logits
    gap = one_by_one[plain[position]] - one_by_one[other[position]]
    return gap.item(), (one_by_one - at_once).abs().max().item()
