"""What drafters made of a target's kind of layers record of them: heads, MLPs, products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import specattn._cpu as _cpu
from specattn.decoding.model.parts import Projection
from specattn.decoding.passes.recording import Recording

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines by position, as `StaticPass.angles` has them."""


class Place(NamedTuple):
    """Where rows stand in their texts.

    Attributes
    ----------
    angles : Angles
    prefix : Tensor, int32 [B]
        Position of the first row.
    depths : Tensor, int32 [B or 1, n]
        Of the rows, from there.
    """

    angles: Angles
    prefix: torch.Tensor
    depths: torch.Tensor


class Storage(NamedTuple):
    """Where new keys and values go.

    Attributes
    ----------
    cache : Tensor [2, B, tokens, Hk, D], or None where they are not kept
    slot : int or None
        Of the first row; None is the position that its prefix says.
    """

    cache: torch.Tensor | None = None
    slot: int | None = None


def projection(linear: Any) -> Projection:
    """Return the weight and bias of a linear module."""
    bias = None if linear.bias is None else linear.bias.detach()
    return Projection(linear.weight.detach(), bias)


def halves(linear: Any) -> list[Projection]:
    """Return the two layers that lie side by side in a linear module without bias."""
    return [Projection(weight, None) for weight in linear.weight.detach().chunk(2)]


def rotate(
    recording: Recording,
    heads: torch.Tensor,
    q_heads: int,
    norms: Sequence[Any],
    eps: float,
    place: Place,
    storage: Storage,
) -> None:
    """Record norm and rotation of heads, and that keys and values are stored.

    Parameters
    ----------
    recording : Recording
    heads : Tensor [B, n, Hq + 2 Hk, D]
        Queries, keys and values: changed in place.
    q_heads : int
    norms : two modules or None
        Of queries and of keys.
    eps : float
    place : Place
    storage : Storage
    """
    weights = [None if norm is None else norm.weight.detach() for norm in norms]
    at = (*place.angles, place.prefix, place.depths)
    cache = (None, None) if storage.cache is None else storage.cache.unbind()
    recording.kernel(_cpu.rotate_heads, heads, q_heads, *weights, eps, *at, *cache, storage.slot)


def add_mlp(
    recording: Recording, block: Any, norm: Any, eps: float, x: torch.Tensor, rows: Any
) -> None:
    """Record ``x += down(silu(gate(norm(x))) * up(norm(x)))`` of a block's own MLP.

    `rows` has room for what is between: ``normed`` [n, H] and ``inner`` [n, intermediate].
    """
    recording.kernel(_cpu.rms_norm, x, norm.weight.detach(), eps, rows.normed)
    recording.product(rows.normed, halves(block.gate_up_proj), rows.inner, gate="silu")
    recording.product(rows.inner, [projection(block.down_proj)], x, residual=x)
