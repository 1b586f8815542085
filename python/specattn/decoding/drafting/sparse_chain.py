"""Self-drafting: the target drafts a chain for itself and attends to few of the cached tokens.

What all such methods share. Each says in a file of its own which tokens it selects, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from specattn.acceptance import Accepted
from specattn.blocks import followed
from specattn.decoding.drafting.budget import Budgeted, SelfDrafting
from specattn.decoding.drafting.chain import ChainBuilder
from specattn.decoding.drafting.gains import NONE, ChainGains, Effort
from specattn.decoding.drafting.pace import FixedSize, PacedDrafter, Share
from specattn.decoding.engine.contract import Draft, DraftContext, Verified
from specattn.decoding.passes.attention import NO_CAPTURE, CaptureSpec, KVSelector, Selection
from specattn.decoding.passes.cached_model import CachedModel
from specattn.tree import Tree


class SparseChain(ChainBuilder):
    """Lets the target draft chains, `max_gamma` tokens of a method or fewer.

    `model` is what drafts: the target, or one with its weights rounded, over the target's cache.
    """

    def __init__(self, method: SelfDrafting, context: DraftContext):
        super().__init__(method.max_gamma, context, rejection=method.rejection)
        target, weights = context.target, method.weights
        self.model: CachedModel = target if weights is None else target.rounded(weights)

    def propose(self, root: torch.Tensor, selectors: Sequence[KVSelector | None]) -> Draft:
        """Draft a token per selector that is of use behind `root` [B]; or the root alone.

        None selects everything. There may be selectors of steps that are not, for a graph of more.
        """
        steps = min(len(selectors), self.sequences.draft_depth)
        if steps and not self.rejection:
            drawing = partial(self.sampler.drawing, root.device)
            tokens = self.model.draft_chain(root, selectors, drawing, steps)
            if tokens is not None:
                return self.draft(tokens, [])
        return self.build(
            root,
            steps,
            lambda token, step: self.model.draft(token, step, selectors[step]).logits,
        )


class PrefixSelection(NamedTuple):
    """Tokens selected among the first `prefix`, int32 [B], of a request; newer ones are visible.

    `followed`: the positions of enough newer ones follow in the selection.
    """

    selection: Selection
    prefix: torch.Tensor
    followed: bool = False

    def compact(self, rows: list[int]) -> PrefixSelection:
        """Return the selection of these rows of the batch alone."""
        indices, lengths, _ = self.selection
        selection = Selection(indices[:, rows], lengths[rows])
        return self._replace(selection=selection, prefix=self.prefix[rows])

    def steps(self, seqlens: torch.Tensor, count: int, newer: int) -> list[Selection]:
        """Return what each of `count` draft steps attends to: they share one table of positions.

        A step more is one more in length: the root and the drafted tokens lie in a row, behind what
        is committed, `seqlens`, int32 [B]. `newer` tokens at most lie between the prefix and the
        last step, which the host must know.
        """
        indices, lengths, _ = self.selection
        if not self.followed:
            indices = followed(indices, lengths, self.prefix, newer)
        first = Selection(indices, lengths).extended(seqlens - self.prefix)
        return [first.extended(step) for step in range(count)]


class SparseDrafter(PacedDrafter):
    """Chains drafted by the target on what a rule selects in every round.

    `capture(rows)`, if given, is what their verification hands out.
    """

    def __init__(
        self,
        method: SelfDrafting,
        context: DraftContext,
        capture: Callable[[int], CaptureSpec] | None = None,
    ):
        self.target, self.sequences = context.target, context.sequences
        self.chain, self.most_rows = SparseChain(method, context), method.max_gamma + 1
        self.arm = FixedSize(Effort(1, method.max_gamma))
        if isinstance(method, Budgeted) and not self.target.full_layers:
            self.arm = FixedSize(NONE)  # no layer can be selected for
        elif efforts := method.efforts:
            plain = {key: x for key, x in vars(method).items() if isinstance(x, int | float | str)}
            name = f"{method.name} {plain}" if plain else method.name
            sizes = [1, *(effort.depth + 1 for effort in efforts)]
            how: Any = ChainGains, self.attempt, capture, self.step()
            self.arm = Share(context, name, efforts, sizes, *how)

    def selectors(self, count: int) -> Sequence[KVSelector | None]:
        """Return what each of `count` draft steps attends to."""
        raise NotImplementedError

    def tokens_read(self, length: int) -> float:
        """Return how many tokens of a text of `length` a draft step reads."""
        return length

    def attempt(self, root: torch.Tensor, effort: Effort) -> None:
        """Draft a chain, and forget it."""
        self.chain.propose(root, self.selectors(effort.depth))

    def step(self) -> float:
        """Return what a drafted token takes, of a pass of one row, by the bytes that both read."""
        lengths = self.sequences.active_lengths
        token = self.target.cache.storage[:, :, :1, :1].nbytes
        own, target = (one.weights_nbytes for one in (self.chain.model, self.target))
        return (own + token * sum(map(self.tokens_read, lengths))) / (target + token * sum(lengths))

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        """Draft a chain on what is selected."""
        steps = max(effort.depth, self.arm.effort.depth) if effort.depth else 0
        return self.chain.propose(root, self.selectors(steps) if steps else [])


class SelectionDrafter(SparseDrafter):
    """Chains drafted by the target on the selection that a verification led to.

    A method's `select` sets `selected`; until then a round drafts nothing. `newer` tokens at most
    lie between the prefix of a selection and the last draft step.
    """

    def __init__(
        self,
        method: Budgeted,
        newer: int,
        context: DraftContext,
        capture: Callable[[int], CaptureSpec] | None = None,
    ):
        self.newer = newer
        self.selected: PrefixSelection | None = None
        super().__init__(method, context, capture)

    def selectors(self, count: int) -> list[Selection]:
        """Return what each of `count` draft steps attends to, none while nothing is selected."""
        if self.selected is None:
            return []
        return self.selected.steps(self.target.cache.seqlens, count, self.newer)

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        """Draft a chain on the selection, or the root alone while there is none."""
        self.prepares = self.selected is None and effort != NONE
        return super().draft(root, effort)

    def observe(self, verified: Verified) -> None:
        """Learn what was accepted of an own draft, and select for the next one."""
        super().observe(verified)
        self.select(verified)

    def select(self, verified: Verified) -> None:
        """Set what the next draft attends to."""
        raise NotImplementedError

    def compact(self, rows: list[int]) -> None:
        """Drop all rows of the batch but these."""
        if self.selected is not None:
            self.selected = self.selected.compact(rows)


class GuidedDrafter(SelectionDrafter):
    """Selects anew by what every verification of a draft captures: as `captured` says."""

    def __init__(self, method: Budgeted, newer: int, context: DraftContext):
        super().__init__(method, newer, context, self.captured)

    def captured(self, rows: int) -> CaptureSpec:
        """Return what ranks the prefix, of a verification of so many rows."""
        raise NotImplementedError

    def attempt(self, root: torch.Tensor, effort: Effort) -> None:
        """Draft a chain and forget it, on what a pass of the root alone leads to at first."""
        if self.selected is None:
            tree, prefix = Tree.chain(0, device=root.device), self.target.cache.seqlens
            found = self.target.verify(tree, root[:, None], capture=self.captured(1))
            nothing = Accepted(root.new_empty(len(root), 0), torch.zeros_like(root), root)
            counts = [0] * len(root)
            self.select(Verified(Draft(tree, root[:, None]), nothing, prefix, found, counts))
        super().attempt(root, effort)

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        """Draft a chain on the selection; without an effort nothing is captured or kept."""
        if effort == NONE:
            self.selected = None
        draft = super().draft(root, effort)
        self.capture = NO_CAPTURE if effort == NONE else self.captured(draft.tree.size)
        return draft


def rows_at(scores: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """Return the scores of one row of each request: [layers, B, rows, N] at [B] to [.., B, N]."""
    return scores[:, torch.arange(len(nodes), device=nodes.device), nodes]


def tokens_of(chunks: torch.Tensor, counts: torch.Tensor, size: int) -> Selection:
    """Return the tokens of chosen chunks: int32 [..., K] and their counts -> [..., K * size]."""
    within = torch.arange(size, dtype=torch.int32, device=chunks.device)
    return Selection((chunks[..., None] * size + within).flatten(-2), counts * size)


def chunk_means(scores: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean score of every chunk of `size` tokens: [..., N] -> [..., ceil(N / size)]."""
    scores = pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf)
    return scores.unflatten(-1, (-1, size)).mean(-1)
