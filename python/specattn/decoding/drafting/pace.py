"""How a drafter is told how much to draft: by a given size, or by its share in a `Pacer`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specattn.decoding.drafting.costs import PASS
from specattn.decoding.drafting.gains import NONE, ChainGains, Effort, Nodes, TreeGains
from specattn.decoding.drafting.pacer import Choice, Pacer
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.model.model import Model
from specattn.decoding.passes.attention import CaptureSpec
from specattn.decoding.text.draws import downloaded
from specattn.decoding.text.sequences import Sequences


class FixedSize:
    """Drafts one effort in every round, of at most `most` rows, root included."""

    def __init__(self, effort: Effort = NONE, most: int | None = None):
        self.effort, self.most = effort, most

    def choose(self, root: torch.Tensor, depth: int) -> Effort:
        """Return the effort of the round that begins behind `root` [B], no deeper than `depth`."""
        return self.effort._replace(depth=min(self.effort.depth, depth))

    def rows(self, effort: Effort, drafted: int, nodes: Callable[[], Nodes]) -> int:
        """Return how many of `drafted` rows, roots included, are verified; `nodes()` are scored."""
        return min(drafted, self.most or drafted)

    def begin(self, effort: Effort, rows: int) -> None:
        """Note that a pass of `rows` rows of each request begins, behind drafting an effort."""

    def end(self, verified: Verified) -> None:
        """Note that it has ended, and learn from it."""

    def among(self, context: DraftContext, name: str, drafter: PacedDrafter) -> Share:
        """Return a part in a pacer of several that drafts as much, or nothing."""
        sizes = [1, self.most or max(2, drafter.most_rows)]
        share = Share(context, f"{name}, fixed", [self.effort], sizes, ChainGains, drafter.attempt)
        share.most = self.most
        return share

    def details(self) -> dict[str, Any]:
        """Return what was found, for the statistics of the run."""
        return {}


class Share(FixedSize):
    """A drafter's part in a pacer, by default one of its own.

    Parameters
    ----------
    context : DraftContext
    name : str
        What its drafts are timed as, in this and later runs.
    efforts, sizes : sequence
        What it may draft, and rows of a pass, ascending from 1.
    gains : type
        `TreeGains` or `ChainGains`.
    run : callable, optional
        ``run(root, effort)`` drafts and forgets it: how drafts are timed. None: they cost nothing.
    capture : callable, optional
        ``capture(rows)``: what verification hands out besides.
    level : float
        What a level of a draft may take, of a round without one, before any was timed.
    """

    def __init__(
        self,
        context: DraftContext,
        name: str,
        efforts: Sequence[Effort],
        sizes: Sequence[int],
        gains: type[TreeGains] | type[ChainGains],
        run: Callable[[torch.Tensor, Effort], Any] | None = None,
        capture: Callable[[int], CaptureSpec] | None = None,
        level: float = 1 / 8,
    ):
        super().__init__()
        self.name, self.efforts, self.run, self.capture = name, list(efforts), run, capture
        self.title, self.level = name, level
        self.sizes, greedy = np.array(sizes), context.sampler.greedy
        self.kind = PASS if capture is None else f"{PASS} for {name}"
        self.depths = np.array([effort.depth for effort in efforts])
        key = "pace", "gains", name, str((efforts, sizes)), greedy, threading.get_ident()
        make = lambda: gains(self.efforts, sizes, greedy)  # noqa: E731
        self.gains: Any = Model.of(context.target.model).recall(key, make)
        self.memo: tuple[Any, Any] = None, None  # what its rounds take, of late ...
        self.found = dict[int, list[Choice]]()  # ... and what fits by that, by depth
        self.deepest = int(self.depths.max())
        self.planned = 1  # rows of the round
        self.noted: tuple[int, Nodes] | None = None  # what is on its way to the host
        self.alone, self.pacer = True, Pacer(context, [self])

    def choose(self, root: torch.Tensor, depth: int) -> Effort:
        """Return the effort of the round that begins; its depth is at most `depth`."""
        self.pacer.prepare(root)
        choice = self.pacer.choose(depth)
        self.planned = choice.rows
        return choice.effort

    def rows(self, effort: Effort, drafted: int, nodes: Callable[[], Nodes]) -> int:
        """Return the rows with which the batch gains the most tokens per second.

        By what this draft offers; on a GPU, where hosts that wait for it take longer than rows do,
        by what such drafts offered before.
        """
        self.found.clear()
        if isinstance(self.gains, ChainGains):  # whose drafts are verified whole
            return super().rows(effort, drafted, nodes)
        number = self.efforts.index(effort)
        if self.pacer.captures:
            host = (downloaded(x) if isinstance(x, torch.Tensor) else x for x in nodes())
            self.noted = number, Nodes(*host)
            return min(drafted, self.planned)
        gains = self.gains.note(number, nodes())
        rates = (len(gains) + gains.sum(0)) / self.pacer.seconds(self)[number]
        return min(drafted, int(self.sizes[rates.argmax()]))

    def begin(self, effort: Effort, rows: int) -> None:
        """Note that a pass begins."""
        self.pacer.begin(rows, self, effort)

    def end(self, verified: Verified) -> None:
        """Note that it has ended; where drafters take turns, who says whose turn it is does."""
        if self.alone:
            self.pacer.end(verified)

    def among(self, context: DraftContext, name: str, drafter: PacedDrafter) -> Share:
        """Return this part."""
        return self

    def join(self, pacer: Pacer, title: str) -> None:
        """Leave it to a pacer of several to say whose turn it is: `title`'s, if its own."""
        self.pacer, self.alone, self.title = pacer, False, title

    def learn(self, drafted: int, emitted: Sequence[Sequence[int] | None]) -> None:
        """Learn what requests went on with behind a draft of so many levels; None: another's."""
        self.found.clear()
        if self.noted is not None:
            self.gains.note(*self.noted)
            self.noted = None
        if isinstance(self.gains, TreeGains):
            self.gains.learn(emitted)
        else:
            self.gains.learn(drafted, [None if one is None else len(one) - 1 for one in emitted])

    def details(self) -> dict[str, Any]:
        """Return what was found."""
        return self.pacer.details()


class PacedDrafter(Drafter):
    """A drafter whose part of a pacer says before every round how much it drafts, if anything.

    A draft that only makes ready the next one sets `prepares`: its round is not timed.
    """

    arm: FixedSize
    sequences: Sequences
    prepares = False
    most_rows = 2  # of a draft, root included

    def propose(self, root: torch.Tensor) -> Draft:
        """Draft as much as pays behind `root` [B]."""
        effort = self.arm.choose(root, self.sequences.draft_depth)
        draft = self.draft(root, effort)
        if not self.prepares:
            self.arm.begin(effort, draft.tree.size)
        return draft

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        """Draft with an effort behind `root` [B]: the root alone without any."""
        raise NotImplementedError

    def attempt(self, root: torch.Tensor, effort: Effort) -> Any:
        """Draft and forget it: nothing that a later round reads may change."""
        raise NotImplementedError

    def observe(self, verified: Verified) -> None:
        """Learn what was accepted of an own draft."""
        if verified.own:
            self.arm.end(verified)

    def details(self) -> dict[str, Any]:
        """Return what drafting was found to cost."""
        return self.arm.details()
