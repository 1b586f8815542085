"""Sizes of passes that are chosen from; and times all that may be drafted at once: `calibrate`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specattn.decoding.drafting.costs import ASIDE, PASS, timed_aside
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
    """Time all that may be drafted behind `root` [B], aside from the text."""
    costs, requests, ledger = pacer.costs, pacer.requests, pacer.ledger
    most: dict[tuple[str, Any], int] = {(PASS, None): pacer.most_looked_up}
    for share in pacer.shares:
        of = share.kind, share.capture
        most[of] = max(most.get(of, 1), int(share.sizes[-1]))
    dues: list[tuple[tuple[str, Any], Any]] = [
        ((ASIDE, requests), partial(_verify, pacer, None, 1))
    ]
    for (kind, capture), size in most.items():
        steps = [*(n for n in _ON_CPUS if n < size), size]
        if pacer.captures:
            steps = captured_sizes(requests, size)
        for n in steps[1:]:
            if n * requests <= pacer.target.runner.most_rows:
                dues.append(((kind, n * requests), partial(_verify, pacer, capture, n)))
    for share in pacer.shares:
        run: Any = share.run
        for effort in share.efforts if run is not None else ():
            dues.append(((share.name, effort), partial(run, effort=effort)))
    for shape, due in dues:
        seconds, first, spent = timed_aside(partial(due, root), pacer.clock, 1 + pacer.captures)
        costs.put(shape, seconds, requests)
        ledger.capture, ledger.spent = first, ledger.spent + spent
        pacer.met.add(shape)


def _verify(pacer: Pacer, capture: Any, rows: int, root: torch.Tensor) -> None:
    """Verify a draft of so many rows, a root and its children, that is rejected."""
    tree = Tree([-1] + [0] * (rows - 1)).to(pacer.target.device)
    tokens = root[:, None].expand(-1, rows).contiguous()
    spec = NO_CAPTURE if capture is None else capture(rows)
    pacer.target.verify(tree, tokens, capture=spec, reuse_buffers=True)
