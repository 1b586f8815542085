"""Attention over a cache that is dealt out over ranks, in a recording of kernel calls.

What `ContextCache` does in Python, with the same kernels: here memory is fixed, so that only the
exchange between the ranks remains a step in Python.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import specattn._cpu as _cpu
from specattn.decoding.passes.attention import Pass
from specattn.decoding.passes.recording import UNIFORM, Recording
from specattn.distributed.context import ContextCache

Scale = tuple[float, float, torch.Tensor | None]
"""Softmax scale, softcap and sinks."""


class Collected(NamedTuple):
    """What a verification collects in a layer: of which rows, for each head, and where."""

    rows: list[int]
    per_head: bool
    scores: torch.Tensor


def given(cache: ContextCache, plan: Pass) -> dict[str, torch.Tensor]:
    """Return what changes from pass to pass beside what every pass has."""
    held, places = cache.placing(plan.prefix, plan.rows if plan.tree_mask is None else 0)
    return {"held": held, "places": places}


def record(
    recording: Recording,
    cache: ContextCache,
    n: int,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    tree_mask: torch.Tensor | None,
    scale: Scale,
    collected: Collected | None,
    state: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Record that layer `n` stores its new keys and values, and attends to those of all ranks.

    Parameters
    ----------
    heads : (Tensor, Tensor, Tensor)
        Queries, keys and values, each [B, T, heads, D].
    inputs : dict of str to Tensor
        What `given` returns, in fixed memory.
    tree_mask : Tensor, int64 [B or 1, T, W], or None for a causal chain
    state : (Tensor, Tensor)
        Where outputs [B, T, Hq, D] and log-sum-exps [B, T, Hq] go.
    """
    q, k, v = heads
    if tree_mask is None:
        recording.kernel(_cpu.write_kv, k, v, *cache.storage[cache.place(n)], inputs["places"])
    else:
        recording.python(lambda: cache.stage(n, k, v))
    rows, (softmax_scale, softcap, sinks) = q.shape[1], scale
    if not cache.holds_new:
        tree_mask = torch.zeros(1, rows, -(-rows // 64), dtype=torch.int64)  # they see no new rows
        sinks = None
    buffer = cache.state_buffer(q)
    hybrid = (q, *cache.layer(n), inputs["held"], k, v, tree_mask, None, None, None)
    read: Any = (*hybrid, softmax_scale, softcap, sinks, *UNIFORM)
    if collected is None:
        recording.kernel(_cpu.hybrid_tree_attention, *read, *buffer.own)
    else:
        what = ("scores", collected.rows, collected.per_head)
        recording.kernel(_cpu.verify_attention, *read, *what, *buffer.own, collected.scores)
    recording.python(lambda: cache.exchange_states(buffer))
    recording.kernel(_cpu.merge_states, *buffer.all, *state)
