"""States of the layers that keep one in place of keys and values.

A verification reads the states and changes nothing: it leaves every node's key, update and decay,
of which a commit makes the states behind the accepted path, in two calls for all layers. What was
rejected is never undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from specattn.ops import causal_conv_commit, gated_delta_commit

_LEAST_ROOM = 16  # rows; rooms are of powers of 2, so that sizes of trees share few of them


class StateShape(NamedTuple):
    """What a gated delta layer keeps of a text, whatever its length: heads, and taps before them.

    A state is float32 [v_heads, k_dim, v_dim]; of the inputs of its convolution, whose channels are
    those of queries, keys and values, the last ``taps - 1`` are kept.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """C: what is convolved."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim


class StateRows(NamedTuple):
    """What the rows of a pass read of one layer's states, and where they leave what a commit needs.

    Attributes
    ----------
    state : Tensor [B, Hv, Dk, Dv]
    conv_state : Tensor [B, K - 1, C]
    room : (Tensor [B, T, C], Tensor [B, T, Hv, Dk + Dv + 1]), or None
        For the inputs of the convolution, and the stash of `specattn.gated_delta_tree`. None: every
        row becomes part of the text, so the states themselves move on, as in a prefill.
    parents : Tensor, int64 [B or 1, T], or None
        Of the nodes of a tree; None is a chain.
    counts : sequence of int, or None
        Makes rows ragged, [1, total]: so many of each request, in order.
    """

    state: torch.Tensor
    conv_state: torch.Tensor
    room: tuple[torch.Tensor, torch.Tensor] | None
    parents: torch.Tensor | None = None
    counts: Sequence[int] | None = None


class States:
    """The states of all layers that keep one, for a batch of requests: zeros, as of empty texts.

    Attributes
    ----------
    state : Tensor [layers, B, Hv, Dk, Dv]
        Float32; float64 beside a float64 model.
    conv_state : Tensor [layers, B, K - 1, C]
    """

    state: torch.Tensor
    conv_state: torch.Tensor

    def __init__(
        self,
        layers: int,
        batch: int,
        shape: StateShape,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.layers, self.shape = layers, shape
        self.precise = torch.promote_types(dtype, torch.float32)
        kept = (shape.taps - 1, shape.channels)
        # A smaller batch lies in the same memory, so that a recorded pass finds it there.
        self._memory = (
            torch.empty(layers * batch, *shape[1:4], dtype=self.precise, device=device),
            torch.empty(layers * batch, *kept, dtype=dtype, device=device),
        )
        self._rooms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._verified = 0
        self._scratch: States | None = None
        self._drafted: int | torch.Tensor | None = None  # where the last draft began
        self.resize(batch)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the states, and of what passes leave for a commit."""
        tensors = [*self._memory, *(x for room in self._rooms.values() for x in room)]
        beside = 0 if self._scratch is None else self._scratch.nbytes
        return sum(x.nbytes for x in tensors) + beside

    def resize(self, batch: int) -> None:
        """Hold so many requests, at most as many as it was made for, of unspecified texts."""
        self.state, self.conv_state = (
            x[: self.layers * batch].unflatten(0, (self.layers, batch)) for x in self._memory
        )

    def clear(self) -> None:
        """Let all requests have empty texts."""
        self._drafted = None
        self.state.zero_()
        self.conv_state.zero_()

    def copy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the states, for `restore`."""
        return self.state.clone(), self.conv_state.clone()

    def restore(self, copy: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Let the states be those of a copy, and the batch that of then."""
        self._drafted = None
        self.resize(copy[0].shape[1])
        self.state.copy_(copy[0])
        self.conv_state.copy_(copy[1])

    def keep(self, rows: list[int]) -> None:
        """Drop all requests but these, and keep them in this order."""
        self.restore((self.state[:, rows], self.conv_state[:, rows]))

    def drafting(self, offset: int | torch.Tensor, rows: int) -> States:
        """Return states for the next `rows` rows of a draft, which may be tried and dropped.

        The rows follow `offset` ones, int or integer [B], behind what is committed: as many of the
        last draft's become part of its text as the offset has grown by. A commit, and so the next
        round, begins anew; so does `forget_draft`.
        """
        if self._scratch is None:
            options: Any = {"dtype": self.conv_state.dtype, "device": self.state.device}
            batch = len(self._memory[0]) // self.layers
            self._scratch = States(self.layers, batch, self.shape, **options)
        if self._drafted is None:
            self._scratch.restore((self.state, self.conv_state))
        else:
            counts = torch.zeros(self.state.shape[1], dtype=torch.int64, device=self.state.device)
            self._scratch.commit(None, counts + (offset - self._drafted))
        self._drafted = offset
        self._scratch.verified(rows)
        return self._scratch

    def forget_draft(self) -> None:
        """Let the next draft begin behind what is committed, as if there had been none before."""
        self._drafted = None

    def room(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where `rows` rows of each request leave what a commit needs, of all layers.

        Inputs [layers, B, T, C] and stash [layers, B, T, Hv, Ds]: the same memory every time.
        """
        shape, batch = self.shape, self.state.shape[1]
        size = 1 << (max(batch * rows, _LEAST_ROOM) - 1).bit_length()
        if size not in self._rooms:
            inputs = self.conv_state.new_empty(self.layers * size, shape.channels)
            width = shape.k_dim + shape.v_dim + 1
            stash = self.state.new_empty(self.layers * size, shape.v_heads, width)
            self._rooms[size] = inputs, stash
        sizes = (self.layers, batch, rows)
        inputs, stash = (x[: self.layers * batch * rows] for x in self._rooms[size])
        return inputs.unflatten(0, sizes), stash.unflatten(0, sizes)

    def rows(self, layer: int, rows: int, parents: torch.Tensor | None) -> StateRows:
        """Return what a verification of `rows` rows of each request uses of one layer."""
        inputs, stash = self.room(rows)
        room = inputs[layer], stash[layer]
        return StateRows(self.state[layer], self.conv_state[layer], room, parents)

    def moving(self, layer: int, counts: Sequence[int] | None) -> StateRows:
        """Return what a prefill uses of one layer: states that move on with the rows."""
        return StateRows(self.state[layer], self.conv_state[layer], None, None, counts)

    def verified(self, rows: int) -> None:
        """Note how many rows of each request the last pass had, which `commit` is about."""
        self._verified = rows

    def commit(self, path: torch.Tensor | None, counts: torch.Tensor) -> None:
        """Move all states along rows of the last pass: `path`, int64 [B, P], or the first ones.

        `counts`, integer [B], are how many of the path become part of the text; 0 changes nothing.
        """
        self._drafted = None
        inputs, stash = (x.flatten(0, 1) for x in self.room(self._verified))
        path = None if path is None else path.repeat(self.layers, 1)
        along = path, counts.long().repeat(self.layers)
        gated_delta_commit(self.state.flatten(0, 1), stash, *along)
        causal_conv_commit(self.conv_state.flatten(0, 1), inputs, *along)
