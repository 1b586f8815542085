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

from specattn.decoding.drafting.costs import ASIDE, PASS, timed_aside
from specattn.decoding.drafting.gains import SIZES, Effort, sizes_up_to
from specattn.decoding.engine.contract import DraftContext
from specattn.decoding.passes.attention import NO_CAPTURE
from specattn.decoding.passes.padding import ROWS
from specattn.tree import Tree

if TYPE_CHECKING:
    from specattn.decoding.drafting.pace import Share
    from specattn.decoding.drafting.pacer import Pacer

AGAIN = 0.005
"""Share of the time for drafts that seem to lose, and for timing again what was long unused."""
CALIBRATING = 0.02
"""Share of the time, this run's own included, for timing shapes before drafts have saved any."""

_ON_CPUS = (1, 4, 9, 17, 33, 65)  # timed with everything else: otherwise rounds themselves tell


def pass_sizes(context: DraftContext, most: int) -> list[int]:
    """Return the rows of a request that are chosen from, ascending to `most`."""
    if not context.target.runner.captures:
        return sizes_up_to(most)
    return captured_sizes(len(context.sequences.active), most)


def captured_sizes(requests: int, most: int) -> list[int]:
    """Return the rows of a request in passes that are captured, up to the first that has `most`."""
    sizes = sorted({total // requests for total in ROWS if total >= requests})
    return [n for n in sizes if n <= SIZES[-1]][: 1 + sum(n < most for n in sizes)] or [1]


class _Due(NamedTuple):
    """A shape that is to be timed: how large it is, what it may take, and ``run(root)``."""

    size: int
    shape: tuple[str, Any]
    seconds: float
    run: Callable[[torch.Tensor], Any]


class Calibrator:
    """Times shapes for a pacer: `everything` at once, or what promises more than is known."""

    def __init__(self, pacer: Pacer, everything: bool):
        self.pacer, self.everything = pacer, everything
        self.hoped = 0.0  # seconds that drafts which were not timed may save this run

    def calibrate(self, root: torch.Tensor, depth: int) -> bool:
        """Time what is due behind `root` [B] if that is expected to pay; return whether it was."""
        pacer, costs, ledger = self.pacer, self.pacer.costs, self.pacer.ledger
        for due in self._due(depth):
            colds = 0 if due.shape[0] == ASIDE else 1 + pacer.captures
            allowed = CALIBRATING * (ledger.elapsed + pacer.left * costs.plain(pacer.requests))
            allowed += max(0.0, ledger.saved) / 4 + self.hoped / 16
            needed = (2 + colds) * due.seconds + ledger.capture
            if isinstance(
                due.shape[1], Effort
            ):  # others' savings are not spent on what hardly pays
                allowed = min(allowed, ledger.spent + self.hoped / 4)
            if not self.everything and ledger.spent + needed > allowed:
                return False
            taken, first, spent = timed_aside(partial(due.run, root), pacer.clock, colds)
            costs.put(due.shape, taken, ledger.elapsed, pacer.requests)
            if colds:
                ledger.capture = first
            ledger.spent, pacer.last_ended = ledger.spent + spent, None
            pacer.met.add(due.shape)
            if not self.everything:
                return True
        return not costs.is_steady(pacer.requests)

    def _due(self, depth: int) -> list[_Due]:
        """Return what is worth timing, the smallest first."""
        pacer, costs, requests = self.pacer, self.pacer.costs, self.pacer.requests
        if not costs.is_steady(requests):
            return []
        plain = costs.plain(requests)
        most = pacer.most_looked_up if self.everything else pacer.wants
        wanted = self._passes(PASS, None, most, pacer.most_looked_up)
        for share, efforts, size in self._promising(depth, plain):
            wanted += self._passes(share.kind, share.capture, size, int(share.sizes[-1]))
            run: Any = share.run
            for one in efforts if run is not None else ():
                taken = costs.guess(share.name, one, share.level * plain)
                draft = partial(run, effort=one)
                wanted.append(_Due(1 + one.width * one.depth, (share.name, one), taken, draft))
        aside = _Due(1, (ASIDE, requests), plain, partial(self._verify, None, 1))
        if any(isinstance(one.shape[1], int) for one in wanted):  # passes are compared with it
            wanted.insert(0, aside)
        met = pacer.met if pacer.captures else costs.seconds  # what a process captured goes with it
        lacks = [one for one in wanted if one.shape not in costs.seconds or one.shape not in met]
        if not lacks:  # what was not met for long may take something else now
            since = lambda one: pacer.ledger.elapsed - costs.confirmed.get(one.shape, 0.0)  # noqa: E731
            again = (one for one in wanted if one is not aside)
            lacks = [one for one in again if 4 * one.seconds < AGAIN * since(one)]
        return sorted(lacks, key=lambda one: one.size)

    def _promising(self, depth: int, plain: float) -> list[tuple[Share, list[Effort], int]]:
        """Return what would be best if it took what it is guessed to: none if known to be worse."""
        pacer, best = self.pacer, self.pacer.best_rate or 1 / plain
        if self.everything:
            return [(share, share.efforts, int(share.sizes[-1])) for share in pacer.shares]
        found: list[tuple[Share, list[Effort], int]] = []
        fastest = best
        for share in pacer.shares if depth else ():
            guess = partial(pacer.costs.guess, share.name, level=share.level * plain)
            drafts = np.array([guess(one) if share.run else 0.0 for one in share.efforts])
            rows = share.sizes * pacer.requests
            passes = pacer.costs.of_passes(share.kind, rows, beyond=np.inf)
            served = rows <= pacer.target.runner.most_rows
            rates = (1 + share.gains.table) / (drafts[:, None] + passes) * served
            if share.is_ready() and rates.max() > fastest:
                at, size = np.unravel_index(rates.argmax(), rates.shape)
                found, fastest = [(share, [share.efforts[at]], int(share.sizes[size]))], rates.max()
        self.hoped = pacer.left * (1 / best - 1 / fastest)
        return found

    def _passes(self, kind: str, capture: Any, size: int, most: int) -> list[_Due]:
        """Return the passes to be timed before one of `size` rows, of up to `most`, is chosen."""
        pacer, requests, found = self.pacer, self.pacer.requests, list[_Due]()
        if not (pacer.captures or self.everything):
            return []
        steps = [*(n for n in _ON_CPUS if n < most), most]
        if pacer.captures:
            steps = captured_sizes(requests, most)
        for rows, before in zip(steps[1:], steps, strict=False):
            if before < size and rows * requests <= pacer.target.runner.most_rows:
                total = rows * requests
                seconds = float(pacer.costs.of_passes(kind, np.array(total), beyond=np.inf))
                verify = partial(self._verify, capture, rows)
                found.append(_Due(rows, (kind, total), seconds, verify))
        return found

    def _verify(self, capture: Any, rows: int, root: torch.Tensor) -> None:
        """Verify a draft of so many rows, a root and its children, that is rejected."""
        tree = Tree([-1] + [0] * (rows - 1)).to(self.pacer.target.device)
        tokens = root[:, None].expand(-1, rows).contiguous()
        spec = NO_CAPTURE if capture is None else capture(rows)
        self.pacer.target.verify(tree, tokens, capture=spec, reuse_buffers=True)
