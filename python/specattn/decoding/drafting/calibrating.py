"""Times what may be drafted, aside from the text: what is worth it, smallest first.

Shapes are paid for out of what drafts are expected to save, and by a share of the time: the first
tokens of a process come as fast as without any of this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from specattn.decoding.drafting.costs import ASIDE, PASS, Costs, Ledger, timed_aside
from specattn.decoding.drafting.gains import SIZES, Effort, sizes_up_to
from specattn.decoding.engine.contract import DraftContext
from specattn.decoding.engine.target import Target
from specattn.decoding.passes.attention import NO_CAPTURE, CaptureSpec
from specattn.decoding.passes.graphs import GraphRunner
from specattn.decoding.passes.padding import ROWS
from specattn.decoding.passes.runner import MOST_ROWS
from specattn.decoding.text.statistics import Clock
from specattn.tree import Tree

if TYPE_CHECKING:
    from specattn.decoding.drafting.pace import Share

AGAIN = 0.005
"""Share of the time for drafts that seem to lose, and for timing again what was long unused."""
CALIBRATING = 0.02
"""Share of the time, this run's own included, for timing shapes before drafts have saved any."""

_ON_CPUS = (1, 4, 9, 17, 33, 65)  # timed; between these lie lines
_CAPTURE = 0.3  # seconds that a CUDA graph takes until one was captured


def captures(target: Target) -> bool:
    """Whether passes of a target are graphs: what was not captured is not to be met by the way."""
    return isinstance(target.runner, GraphRunner)


def pass_sizes(context: DraftContext, most: int) -> list[int]:
    """Return the rows of a request that are chosen from, ascending to `most`."""
    if not captures(context.target):
        return sizes_up_to(most)
    return captured_sizes(len(context.sequences.active), most)


def captured_sizes(requests: int, most: int) -> list[int]:
    """Return the rows of a request in passes that are captured, up to the first that has `most`."""
    sizes = sorted({total // requests for total in ROWS if total >= requests})
    return [n for n in sizes if n <= SIZES[-1]][: 1 + sum(n < most for n in sizes)] or [1]


class Due(NamedTuple):
    """A shape that is to be timed: how large it is, what it may take, and ``run(root)``."""

    size: int
    shape: tuple[str, Any]
    seconds: float
    run: Callable[[torch.Tensor], Any]


class Calibrating:
    """What a pacer times aside; the attributes are `Pacer`'s."""

    target: Target
    clock: Clock
    shares: list[Share]
    ledger: Ledger
    met: tuple[set[Any], set[Any]]  # shapes that are recorded or captured: passes, and drafts
    captures: bool
    everything: bool  # whether all is timed at once
    best_rate: float  # tokens per second of what was chosen last
    most_looked_up: int
    wants: int  # rows that what was looked up had a use for
    last_ended: Any  # the moment when the last round ended
    hoped = 0.0  # seconds that drafts which were not timed may save this run

    @property
    def costs(self) -> Costs:
        """What is known of such a batch and length."""
        raise NotImplementedError

    @property
    def requests(self) -> int:
        """Running requests."""
        raise NotImplementedError

    @property
    def left(self) -> int:
        """Tokens that the run is taken to go on for."""
        raise NotImplementedError

    def calibrate(self, root: torch.Tensor, depth: int) -> None:
        """Time a shape aside if that is expected to pay, or all that there are if so asked."""
        costs = self.costs
        for due in self._due(depth):
            once = [taken for (kind, _), taken in costs.first.items() if kind == due.shape[0]]
            first = max(once, default=_CAPTURE if self.captures else due.seconds)
            colds = 0 if due.shape[0] == ASIDE else 1 + self.captures
            allowed = CALIBRATING * (self.ledger.elapsed + self.left * costs.plain(self.requests))
            allowed += max(0.0, self.ledger.saved) / 4 + self.hoped / 16
            needed = (2 + colds) * due.seconds + first * (colds > 0)
            if not self.everything and self.ledger.spent + needed > allowed:
                return
            taken, first, spent = timed_aside(partial(due.run, root), self.clock, colds)
            costs.put(due.shape, taken, first, self.ledger.elapsed, self.requests)
            self.ledger.spent, self.last_ended = self.ledger.spent + spent, None
            self.met[isinstance(due.shape[1], Effort)].add(due.shape)
            if not self.everything:
                return

    def _due(self, depth: int) -> list[Due]:
        """Return what is worth timing, the smallest first."""
        costs, requests, wanted = self.costs, self.requests, list[Due]()
        if not costs.is_steady(requests):
            return wanted
        plain = costs.plain(requests)
        for share, effort, size in self._promising(depth, plain):
            wanted += self._sizes(share.kind, share.capture, size, int(share.sizes[-1]))
            run: Any = share.run
            for one in share.efforts if run is not None else ():
                if self.everything or (one.width <= effort.width and one.depth <= effort.depth):
                    taken = costs.guess(share.name, one, share.level * plain)
                    nodes, draft = 1 + one.width * one.depth, partial(run, effort=one)
                    wanted.append(Due(nodes, (share.name, one), taken, draft))
        most = self.most_looked_up if self.everything else self.wants
        wanted += self._sizes(PASS, None, most, self.most_looked_up)
        if wanted:  # of no use without another
            taken = plain + min(one.seconds for one in wanted)
            wanted.insert(0, Due(1, (ASIDE, requests), taken, partial(self._verify, None, 1)))
        lacks = [one for one in wanted if one.shape not in costs.seconds]
        if not lacks:  # what was not met for long may take something else now
            since = lambda one: self.ledger.elapsed - costs.confirmed.get(one.shape, 0.0)  # noqa: E731
            lacks = [one for one in wanted[1:] if 4 * one.seconds < AGAIN * since(one)]
        return sorted(lacks, key=lambda one: one.size)

    def _promising(self, depth: int, plain: float) -> list[tuple[Share, Effort, int]]:
        """Return what would be best if it took what it is guessed to: none if known to be worse."""
        found: list[tuple[float, Share, Effort, int]] = []
        for share in self.shares:
            if not share.is_ready() or not depth:
                continue
            guess = partial(self.costs.guess, share.name, level=share.level * plain)
            drafts = np.array([guess(one) if share.run else 0.0 for one in share.efforts])
            rows = share.sizes * self.requests
            passes = self.costs.of_passes(share.kind, rows, beyond=True)
            passes = np.where(rows <= MOST_ROWS, passes, np.inf)
            rates = (1 + share.gains.table) / (drafts[:, None] + passes)
            at, size = np.unravel_index(rates.argmax(), rates.shape)
            found.append((rates[at, size], share, share.efforts[at], int(share.sizes[size])))
        best = self.best_rate or 1 / plain
        fastest = max((one[0] for one in found), default=best)
        self.hoped = self.left * max(0.0, 1 / best - 1 / fastest)
        if self.everything:
            return [(share, share.efforts[-1], int(share.sizes[-1])) for share in self.shares]
        return [one[1:] for one in sorted(found, key=lambda one: -one[0])[:1] if one[0] > best]

    def _sizes(self, kind: str, capture: Any, size: int, most: int) -> list[Due]:
        """Return the passes to be timed before one of `size` rows, of up to `most`, is chosen."""
        steps, requests = [*(n for n in _ON_CPUS if n < most), most], self.requests
        if self.captures:
            steps = captured_sizes(requests, most)
        chosen = [n for n, before in zip(steps[1:], steps, strict=False) if before < size]
        found = list[Due]()
        for rows in chosen:
            if rows * requests <= MOST_ROWS:
                seconds = float(self.costs.of_passes(kind, np.array(rows * requests), beyond=True))
                run = partial(self._verify, None if capture is None else capture(rows), rows)
                found.append(Due(rows, (kind, rows * requests), seconds, run))
        return found

    def _verify(self, capture: CaptureSpec | None, rows: int, root: torch.Tensor) -> None:
        """Verify a draft of so many rows that is rejected."""
        tree, tokens = self._tree(rows), root[:, None].expand(-1, rows).contiguous()
        self.target.verify(tree, tokens, capture=capture or NO_CAPTURE, reuse_buffers=True)

    def _tree(self, rows: int) -> Tree:
        """Return a tree of so many rows: a root and its children."""
        return Tree([-1] + [0] * (rows - 1)).to(self.target.device)
