"""Sizes of passes that are chosen from; and times all that may be drafted at once: `calibrate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from specattn.decoding.drafting.costs import PASS
from specattn.decoding.drafting.gains import SIZES, sizes_up_to
from specattn.decoding.engine.contract import DraftContext
from specattn.decoding.passes.attention import NO_CAPTURE
from specattn.decoding.passes.padding import ROWS
from specattn.tree import Tree

if TYPE_CHECKING:
    from specattn.decoding.drafting.pacer import Pacer

_ON_CPUS = (1, 4, 9, 17, 33, 65)  # timed; between these lie lines


def pass_sizes(context: DraftContext, most: int) -> list[int]:
    """Return the rows of a request that are chosen from, ascending to `most`."""
    if not context.target.runner.captures:
        return sizes_up_to(most)
    return captured_sizes(len(context.sequences.active), most)


def captured_sizes(requests: int, most: int) -> list[int]:
    """Return the rows of a request in passes that are captured, up to the first that has `most`."""
    sizes = sorted({total // requests for total in ROWS if total >= requests})
    return [n for n in sizes if n <= SIZES[-1]][: 1 + sum(n < most for n in sizes)] or [1]


def calibrate(pacer: Pacer, root: torch.Tensor) -> None:
    """Time all that may be drafted behind `root` [B], aside from the text.

    Rounds take more than passes aside do: as much more as those that draft nothing took so far.
    """
    costs, requests = pacer.costs, pacer.requests
    more = costs.plain(requests) - _timed(pacer, partial(_verify, pacer, None, 1, root))[1]
    most: dict[tuple[str, Any], int] = {(PASS, None): pacer.most_looked_up}
    dues = list[tuple[tuple[str, Any], float, Any]]()
    for share in pacer.shares:
        of, run = (share.kind, share.capture), cast(Any, share.run)
        most[of] = max(most.get(of, 1), int(share.sizes[-1]))
        for effort in share.efforts if run is not None else ():
            dues.append(((share.name, effort), 0.0, partial(run, root, effort)))
    for (kind, capture), size in most.items():
        steps = [*(n for n in _ON_CPUS if n < size), size]
        if pacer.captures:
            steps = captured_sizes(requests, size)
        for n in steps[1:]:
            if n * requests <= pacer.target.runner.most_rows:
                verify = partial(_verify, pacer, capture, n, root)
                dues.append(((kind, n * requests), max(0.0, more), verify))
    for shape, besides, due in dues:
        pacer.ledger.capture, seconds = _timed(pacer, due)
        costs.put(shape, seconds + besides)
        pacer.met.add(shape)


def _timed(pacer: Pacer, due: Callable[[], Any]) -> tuple[float, float]:
    """Return what the first run takes besides, and what others take: the lesser of two."""
    times, clock = [], pacer.clock
    for _ in range(3 + pacer.captures):  # a capture is warmed up once
        begin = clock.now()
        due()
        pacer.target.forget_draft()
        end = clock.now()
        clock.wait(end)
        times.append(clock.seconds(begin, end))
    seconds = min(times[-2:])
    return max(0.0, times[0] - seconds), seconds


def _verify(pacer: Pacer, capture: Any, rows: int, root: torch.Tensor) -> None:
    """Verify a draft of so many rows, a root and its children, that is rejected."""
    tree = Tree([-1] + [0] * (rows - 1)).to(pacer.target.device)
    tokens = root[:, None].expand(-1, rows).contiguous()
    spec = NO_CAPTURE if capture is None else capture(rows)
    pacer.target.verify(tree, tokens, capture=spec, reuse_buffers=True)
