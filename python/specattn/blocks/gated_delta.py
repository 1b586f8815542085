"""A gated delta layer between its products: the convolution and the rule, over a pass or a text."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from specattn.ops import (
    causal_conv_commit,
    causal_conv_tree,
    gated_delta_commit,
    gated_delta_tree,
)
from specattn.ops.gated_delta_tree import MOST_ROWS
from specattn.states import StateRows


class Convolution(NamedTuple):
    """A depthwise causal convolution, with a SiLU behind it: weight [C, K], bias [C] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Gates(NamedTuple):
    """``beta = most_beta sigmoid(b)`` and ``g = rate softplus(a + bias)`` of products b and a.

    `rate`, at most 0, and `bias` are float32 [Hv].
    """

    rate: torch.Tensor
    bias: torch.Tensor
    most_beta: float


def split_mixed(
    mixed: torch.Tensor, k_heads: int, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values [B, T, heads, D] of what was convolved, [B, T, C]."""
    k_dim, v_dim = state.shape[-2:]
    keys = k_heads * k_dim
    q, k, v = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], -1)
    return q.unflatten(-1, (-1, k_dim)), k.unflatten(-1, (-1, k_dim)), v.unflatten(-1, (-1, v_dim))


def gated_delta(
    x: torch.Tensor,
    convolution: Convolution,
    g: torch.Tensor,
    beta: torch.Tensor,
    k_heads: int,
    rows: StateRows,
) -> torch.Tensor:
    """Return the outputs [B, T, Hv, Dv] of rows whose inputs of the convolution are x [B, T, C].

    Rows without room for a later commit become part of the text at once, chunk by chunk.
    """
    out = x.new_empty(*g.shape, rows.state.shape[-1])
    for requests, place in _chunks(x, rows):
        state, conv_state, one = rows.state[requests], rows.conv_state[requests], x[place]
        mixed = causal_conv_tree(one, *convolution, conv_state, rows.parents, activation="silu")
        heads = (*split_mixed(mixed, k_heads, state), g[place], beta[place], state, rows.parents)
        stash = None if rows.room is None else rows.room[1]
        _, stash = gated_delta_tree(*heads, l2_norm=True, out=out[place], stash=stash)
        if rows.room is None:
            counts = torch.full((len(one),), one.shape[1], device=x.device)
            gated_delta_commit(state, stash, None, counts)
            causal_conv_commit(conv_state, one, None, counts)
    return out


def _chunks(x: torch.Tensor, rows: StateRows) -> Iterator[tuple[slice, tuple[slice, slice]]]:
    """Yield which requests, and which of their rows, are next: all, of those of a verification."""
    if rows.counts is not None:  # side by side in one row of the batch
        bounds = enumerate(pairwise(accumulate(rows.counts, initial=0)))
        for request, (first, end) in bounds:
            for start in range(first, end, MOST_ROWS):
                place = slice(start, min(end, start + MOST_ROWS))
                yield slice(request, request + 1), (slice(None), place)
        return
    size = MOST_ROWS if rows.room is None else x.shape[1]
    for start in range(0, x.shape[1], size):
        yield slice(None), (slice(None), slice(start, start + size))
