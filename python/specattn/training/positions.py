"""Positions of short training rows that imitate long texts (LongSpec v2, §3.2)."""

from __future__ import annotations

import torch

ANCHORS = 4
"""Leading tokens that keep their positions, as attention sinks (LongSpec v2, Algorithm 1)."""


def anchor_offset_positions(
    rows: int, length: int, max_length: int, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return positions of short rows that reach, over many rows, to the model's last position.

    LongSpec v2, Algorithm 1: the first `ANCHORS` tokens stay at 0, 1, 2, 3; all others move on by
    one random offset per row, drawn evenly from 0 to ``max_length - length``, both included.

    Parameters
    ----------
    rows, length : int
    max_length : int
        Positions that the target supports; at least `length`.
    generator : torch.Generator, optional
        Source of randomness, on the CPU; the global one by default.

    Returns
    -------
    Tensor, int64 [rows, length]

    Raises
    ------
    ValueError
        A row is longer than `max_length`.
    """
    if length > max_length:
        raise ValueError(f"rows of {length} tokens exceed the target's {max_length} positions")
    offsets = torch.randint(max_length - length + 1, (rows, 1), generator=generator)
    positions = torch.arange(length).repeat(rows, 1)
    positions[:, ANCHORS:] += offsets
    return positions
