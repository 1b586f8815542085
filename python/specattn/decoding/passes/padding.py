"""Few shapes of passes: trees of any form and size are padded to some, chains are trees too.

Every shape of a captured pass is a CUDA graph, and to capture one takes longer than many passes.
So what a graph depends on is the number of rows alone, and of few numbers; and one of more rows, or
of more requests, serves fewer (`Replayed.fitting`): when requests of a batch end, where they lay
there are some without text. Recorded kernel calls on a CPU keep their shapes: to record takes about
as long as a pass, while the mask of a chain alone takes 1 to 20% more in each.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import pad

from specattn.blocks import Replayed, Size
from specattn.decoding.passes.attention import NO_CAPTURE, Pass, Selection
from specattn.reference.tree_mask import WORD_BITS, pack_tree_mask

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 513, 32))
"""Rows of a pass, all requests together: a matrix unit takes 8 or 16 at a time, and of reading the
weights the rows that are added hardly show."""
SPARE = 32
"""How many rows padding may add to a request: that many tokens more have room in a cache."""


def padded_rows(batch: int, rows: int) -> int:
    """Return how many rows of each of `batch` requests a pass of `rows` rows has at last.

    The most that fit into the next of `ROWS`; one row stays alone.
    """
    total = next((total for total in ROWS if total >= batch * rows), batch * rows)
    return rows if rows == 1 else total // batch


def fitted(
    passes: Replayed, key: Hashable, plan: Pass, tokens: torch.Tensor
) -> tuple[Pass, torch.Tensor, Size | None]:
    """Return a pass of the shape in which it is captured, its tokens, and in which size of a key.

    The plan is that of a tree, unless it is of one row or reads a selection. Rows are added where
    nothing is captured of them, and there is room. None: no size but its own serves it.
    """
    least, own, most = _sizes(plan, len(tokens))
    size = passes.fitting(key, least, own, most) if _serves(plan) else None
    _, rows = size or own
    if plan.selector is not None or rows == 1:
        return plan, tokens, size
    tree: Any = padded_tree(plan, rows)
    tokens = pad(tokens, (0, rows - plan.rows))
    if plan.states is not None:
        plan.states.verified(rows)
    return replace(plan, rows=rows, **tree), tokens, size


def captured_rows(passes: Replayed, key: Hashable, plan: Pass) -> int | None:
    """Return how many rows, all requests together, the graph has that would run such a pass.

    None: it would be captured.
    """
    size = passes.kept_size(key, *_sizes(plan, len(plan.prefix))) if _serves(plan) else None
    return None if size is None else size[0] * size[1]


def _serves(plan: Pass) -> bool:
    """Whether graphs of more requests or rows serve a pass: states lie by the number of these."""
    return plan.states is None and (plan.selector is None or isinstance(plan.selector, Selection))


def _sizes(plan: Pass, batch: int) -> tuple[Size, Size, Size]:
    """Return requests and rows of a pass: what it has, of a graph of its own, and the most."""
    rows = most = own = plan.rows
    if plan.selector is None and plan.capture == NO_CAPTURE:
        most, own = rows + plan.cache.spare, padded_rows(batch, rows)
    return (batch, rows), (batch, own if own <= most else rows), (batch, most)


def padded_tree(plan: Pass, rows: int) -> dict[str, torch.Tensor]:
    """Return mask [B, rows, W], depths and parents [B, rows] of a plan, whatever its tree.

    Rows that are added see themselves alone, as the root's children of a request's text, and are
    seen by no others.
    """
    batch, count = len(plan.prefix), plan.rows
    mask, depths, parents = plan.tree_mask, plan.depths, plan.parents
    if mask is None:
        mask, depths, parents = _chain(count, plan.prefix.device)
    assert depths is not None
    found = {"tree_mask": mask.expand(batch, -1, -1), "depths": depths.int().expand(batch, -1)}
    if plan.states is not None:
        assert parents is not None
        found["parents"] = parents.expand(batch, -1)
    if rows == count:
        return found
    alone = _alone(count, rows, plan.prefix.device).expand(batch, -1, -1)
    words = alone.shape[-1] - mask.shape[-1]
    found["tree_mask"] = torch.cat([pad(found["tree_mask"], (0, words)), alone], 1)
    found["depths"] = pad(found["depths"], (0, rows - count))
    if "parents" in found:
        found["parents"] = pad(found["parents"], (0, rows - count), value=-1)
    return found


@lru_cache(maxsize=256)
def _chain(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mask, depths and parents of a causal chain."""
    depths = torch.arange(rows, device=device)[None]
    seen = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    return pack_tree_mask(seen), depths, depths - 1


@lru_cache(maxsize=256)
def _alone(first: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return what the rows from `first` on see: themselves."""
    words = -(-rows // WORD_BITS)
    seen = torch.eye(rows, words * WORD_BITS, dtype=torch.bool, device=device)
    return pack_tree_mask(seen)[first:]
