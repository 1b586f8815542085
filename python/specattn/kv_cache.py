"""One preallocated, ragged key/value cache for all layers of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from specattn.backends.select import chosen
from specattn.ops import (
    hybrid_tree_attention,
    importance_scores,
    select_topk,
    sparse_gather_attention,
    verify_attention,
    write_kv,
)
from specattn.reference._eight_bits import EIGHT_BITS, dequantised
from specattn.states import States
from specattn.stock import Stock

_SCALE_BYTES = 4  # at the end of a row of 8 bits: its scale, float32
_ROW = {"cuda": 16}  # bytes of which rows of 8 bits are multiples: a GPU's widest load


def row_bytes(head_dim: int, device: torch.device | str) -> int:
    """Return the bytes of a row of 8 bits: its elements, room to whole loads, and its scale."""
    step = _ROW.get(torch.device(device).type, _SCALE_BYTES)
    return -(-(head_dim + _SCALE_BYTES) // step) * step


class NewRows(Protocol):
    """The rows of a pass, behind a prefix of what is cached.

    They go to `slots` (`KVCache.slots`). Every row sees `prefix`, int32 [B], cached tokens, and of
    the others what `tree_mask`, packed, says: None for a causal chain. No row's position reaches
    `max_seqlen`, a bound on the host.
    """

    @property
    def slots(self) -> tuple[torch.Tensor, torch.Tensor]: ...  # noqa: D102
    @property
    def prefix(self) -> torch.Tensor: ...  # noqa: D102
    @property
    def tree_mask(self) -> torch.Tensor | None: ...  # noqa: D102
    @property
    def max_seqlen(self) -> int: ...  # noqa: D102


class NewHeads(NamedTuple):
    """One layer's queries [B, T, Hq, D], keys and values [B, T, Hk, D] of the rows of a pass.

    Keys and values are stored before anything is attended to.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: NewRows


class KVCache:
    """Keys and values of a batch of requests, each of its own length.

    Everything lies in one tensor, so that accepting a path of a tree is one move over all layers:
    `storage` [layers, keys and values, batch, capacity, kv_heads, head_dim]. A request can hold
    `capacity` tokens, drafted ones included. What stands at or beyond its length is unspecified and
    never read: rejected tokens need no cleaning up, they are overwritten.

    With `stored`, a type of 8 bits, rows are written as `specattn.write_kv` does with dynamic
    scales, each of which lies at its row's end: `storage` is uint8 [.., head_dim + 4], on a GPU up
    to the next 16, so whatever moves a row moves its scale. `dtype` is then that of the keys and
    values that come.

    With a `latent`, the first so many channels of a key are the value, too (multi-head latent
    attention): one row, with one scale, stands for both, and `storage` is [layers, 1, batch, ...].

    `seqlens`, int32 [batch], counts the committed tokens; it is replaced, never changed in place,
    so it may be kept. `in_kernels`: a recording of kernel calls may read the layers themselves.
    `states`: what other layers keep in place of keys (`HybridCache`). `spare`: how many tokens of
    the capacity its user leaves to rows that mean nothing, so that passes may be padded.
    """

    in_kernels: ClassVar[bool] = True
    states: States | None = None
    spare: int = 0

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        stored: torch.dtype | None = None,
        latent: int | None = None,
    ):
        if latent is not None and not 0 < latent <= head_dim:
            raise ValueError(f"latent: expected 1 to head_dim={head_dim}, got {latent}")
        if stored is not None and stored not in EIGHT_BITS:
            expected = " or ".join(map(str, EIGHT_BITS))
            raise ValueError(f"stored: expected None or {expected}, got {stored}")
        shape = (layers, 2 if latent is None else 1, batch, capacity, kv_heads, head_dim)
        if min(shape) < 1:
            raise ValueError(
                "layers, batch, capacity, kv_heads and head_dim must be positive, got "
                f"{layers}, {batch}, {capacity}, {kv_heads}, {head_dim}"
            )
        self.dtype, self.stored, self.head_dim, self.latent = dtype, stored, head_dim, latent
        kind = dtype
        if stored is not None:
            shape, kind = (*shape[:-1], row_bytes(head_dim, device)), torch.uint8
        try:
            self.storage = torch.empty(shape, dtype=kind, device=device)
        except RuntimeError as error:
            if torch.device(device).type != "cpu":  # whose own errors say as much
                raise
            size = math.prod(shape) * kind.itemsize / 2**30
            room = f"{batch} x {capacity:,} tokens, {size:,.1f} GiB"
            raise MemoryError(f"no memory for a cache of {room}") from error
        self._whole = self.storage  # of all requests, when some have left
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        self._lengths_of = cache(_lengths)
        self._known: tuple[torch.Tensor | None, list[int]] = None, []  # lengths, on the host too
        self._by_numpy: tuple[torch.Tensor | None, Any] = None, None  # storage, and a view of it

    @property
    def batch_size(self) -> int:
        """B: the requests that are still alive."""
        return self.storage.shape[2]

    def clear(self) -> None:
        """Hold no token, of as many requests as at first."""
        self.storage = self._whole
        self.seqlens = self.seqlens.new_zeros(self.batch_size)

    @property
    def capacity(self) -> int:
        """N: the tokens that one request can hold."""
        return self.storage.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take, room that is not used yet included."""
        return self.storage.nbytes

    @property
    def width(self) -> int:
        """Entries of collected scores."""
        return self.capacity

    def held(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return how many of the first `lengths` [B] tokens lie here: all of them."""
        return lengths

    def place(self, layer: int) -> int:
        """Return the index in `storage` of a layer."""
        return layer

    def rows(self, index: int) -> torch.Tensor:
        """Return one layer's part of `storage`, [2, B, N, Hk, ..], of latents [1, ..]."""
        return self.storage[self.place(index)]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one layer's keys and values, each [B, N, Hk, D], as they are stored.

        Of latents the values are a view of the keys.
        """
        rows = self.rows(index)
        if self.stored is not None:
            rows = rows.view(self.stored)[..., : self.head_dim]
        return rows[0], rows[-1][..., : self.latent]

    def scales(self, index: int) -> dict[str, Any]:
        """Return views of one layer's scales by the primitives' names, none without 8 bits."""
        if self.stored is None:
            return {}
        scales = self.rows(index).view(torch.float32)[..., -1]
        return {"k_scale": scales[0], "v_scale": scales[-1]}

    def numbers(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what rows of `storage` mean, in `dtype`."""
        if self.stored is None:
            return rows
        scale = rows.view(torch.float32)[..., -1]
        return dequantised(rows.view(self.stored)[..., : self.head_dim], scale, self.dtype)

    def places(self, slots: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return `slots` as `write_kv` takes them; IndexError on the CPU beyond the capacity."""
        requests, positions = slots
        if positions.device.type == "cpu" and (most := int(positions.max())) >= self.capacity:
            raise IndexError(f"slots: expected positions below {self.capacity}, got {most}")
        return requests * self.capacity + positions

    def slots(
        self, count: int, offset: int | torch.Tensor = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `slots_behind` of ``seqlens + offset``; `offset` may be one for each request."""
        return self.slots_behind(self.seqlens + offset, count)

    def slots_behind(self, prefix: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where `count` rows behind `prefix`, integer [B], lie: requests [B, 1], positions.

        Positions, int64 [B, count], are also the tokens' own where rows follow one another.
        Computed once per pass and given to `write` for every layer.
        """
        device = self.storage.device
        requests = torch.arange(self.batch_size, device=device)[:, None]
        return requests, prefix[:, None] + torch.arange(count, device=device)

    def write(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Store new keys and values, each [B, T, Hk, D], at `slots`; lengths stay as they are.

        Of latents a key is both. IndexError: on the CPU, a position is beyond the capacity.
        """
        if self.stored is not None:
            keys, values = self.layer(layer)
            options = {**self.scales(layer), "scale": "dynamic"}
            if self.latent is None:
                write_kv(k, v, keys, values, self.places(slots), **options)
            else:
                del options["v_scale"]
                write_kv(k, None, keys, None, self.places(slots), **options)
            return
        place = self.place(layer)
        self.storage[place, 0][slots] = k
        if self.latent is None:
            self.storage[place, 1][slots] = v

    def attend(self, new: NewHeads, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values; attend to all as `specattn.hybrid_tree_attention` does."""
        options |= self._scales_of(new)
        return hybrid_tree_attention(*self._stored(new), None, None, new.rows.tree_mask, **options)

    def attend_and_collect(
        self, new: NewHeads, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store new keys and values; attend and collect as `specattn.verify_attention` does."""
        options |= self._scales_of(new)
        return verify_attention(*self._stored(new), None, None, new.rows.tree_mask, **options)

    def attend_selected(
        self, new: NewHeads, indices: torch.Tensor, lengths: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values; attend as `specattn.sparse_gather_attention` does."""
        options |= self._scales_of(new)
        q, k_cache, v_cache, _ = self._stored(new)
        return sparse_gather_attention(
            q, k_cache, v_cache, indices, lengths, new.k, new.v, **options
        )

    def _stored(
        self, new: NewHeads
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store new keys and values; return queries, what is cached, and how much is the prefix."""
        self.write(new.layer, new.k, new.v, new.rows.slots)
        k_cache, v_cache = (x[:, : new.rows.max_seqlen] for x in self.layer(new.layer))
        return new.q, k_cache, v_cache, new.rows.prefix

    def _scales_of(self, new: NewHeads) -> dict[str, Any]:
        return {name: x[:, : new.rows.max_seqlen] for name, x in self.scales(new.layer).items()}

    def attend_committed(
        self, layer: int, q: torch.Tensor, seqlens: torch.Tensor, unseen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the first `seqlens` cached tokens alone.

        `unseen`, zeros [T, ceil(T / 64)], is the mask of a tree of which nothing is visible.
        """
        scales = self.scales(layer)
        return hybrid_tree_attention(q, *self.layer(layer), seqlens, None, None, unseen, **scales)

    def importance_scores(
        self, layer: int, q: torch.Tensor, seqlens: torch.Tensor, longest: int | None = None
    ) -> torch.Tensor:
        """Score the first `longest` tokens of a layer, as `specattn.importance_scores` does."""
        scale = self.scales(layer).get("k_scale")
        options: Any = {} if scale is None else {"k_scale": scale[:, :longest]}
        return importance_scores(q, self.layer(layer)[0][:, :longest], seqlens, **options)

    def gathered(self, scores: torch.Tensor, unit: int = 1) -> torch.Tensor:
        """Return collected scores as those of all tokens, one for each `unit` of them."""
        return scores

    def select_topk(
        self, scores: torch.Tensor, seqlens: torch.Tensor, **share: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select by collected scores [n, width], as `specattn.select_topk` does."""
        return select_topk(scores, seqlens, **share)

    def commit(
        self,
        nodes: torch.Tensor,
        counts: torch.Tensor,
        *,
        in_place: bool = False,
        on_host: Sequence[int] | None = None,
    ) -> None:
        """Keep the root and the accepted nodes of a verified tree, in all layers at once.

        Node n of the tree lies at ``seqlens + n``. The accepted path, `nodes`, int64 [B, depth]
        padded with -1 and without the root, is moved to follow the root without gaps; `counts`,
        integer [B], are how many nodes are accepted. With `in_place` the tree was a chain: they
        already lie where they belong. `on_host` are the counts where the host knows them, which
        saves a cache on the CPU from reading tensors.
        """
        if self.storage.device.type != "cpu":
            if not in_place and nodes.shape[1]:
                self._move_all(nodes, counts)
            sums = torch.empty_like(self.seqlens)
            self.seqlens = torch.add(self.seqlens, counts, out=sums).add_(1)
            return
        known, before = self._known
        if known is not self.seqlens:
            before = self.seqlens.tolist()
        added = counts.tolist() if on_host is None else on_host
        if not in_place:
            self._move_each(nodes.tolist(), added, before)
        after = [length + count + 1 for length, count in zip(before, added, strict=True)]
        self.seqlens, places = self._lengths_of(len(after)).take()
        for request, length in enumerate(after):
            places[request] = length
        self._known = self.seqlens, after

    def _move_all(self, nodes: torch.Tensor, counts: torch.Tensor) -> None:
        """Move the accepted paths in one launch, or with torch's operators; nothing waits."""
        _, backend = chosen("write_kv", self.storage.device, self.dtype)
        if backend.name == "triton":
            from specattn.triton_kernels.move_path import move_path  # needs triton

            move_path(self.storage, nodes, counts, self.seqlens)
            return
        requests, kept = self.slots(nodes.shape[1], offset=1)
        source = torch.where(nodes < 0, kept, self.seqlens[:, None] + nodes)
        self.storage[:, :, requests, kept] = self.storage[:, :, requests, source]

    def _move_each(
        self, nodes: list[list[int]], counts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Move the accepted paths row by row, which is quicker than a few calls of torch."""
        of, rows = self._by_numpy
        if of is not self.storage:  # each token's row is one value
            flat = self.storage.flatten(-2).view(torch.uint8)
            rows = flat.numpy().view(f"V{flat.shape[-1]}")[..., 0]
            self._by_numpy = self.storage, rows
        for request, (path, count, root) in enumerate(zip(nodes, counts, lengths, strict=True)):
            own = rows[:, :, request]
            for place, node in enumerate(path[:count], start=1):
                if node != place:  # further back: nodes ascend along a path
                    own[:, :, root + place] = own[:, :, root + node]

    def retire(self, finished: Sequence[bool]) -> list[int]:
        """Drop the finished requests, of B flags; the last survivors move into the holes.

        Returns the former row of every request that is left, by which whatever else is kept per
        request must be indexed.
        """
        if len(finished) != self.batch_size:
            raise ValueError(f"finished must have {self.batch_size} entries, got {len(finished)}")
        alive = [row for row, done in enumerate(finished) if not done]
        rows = list(range(len(alive)))
        movers = (row for row in alive if row >= len(alive))
        for hole in (row for row in rows if finished[row]):
            rows[hole] = next(movers)
            self.storage[:, :, hole] = self.storage[:, :, rows[hole]]
        self.storage = self.storage[:, :, : len(alive)]
        self.seqlens = self.seqlens[rows]
        return rows


def _lengths(requests: int) -> Stock[tuple[torch.Tensor, Any]]:
    """Return tensors for the lengths of so many requests on the CPU, and numpy's views of them."""

    def make(count: int) -> list[tuple[torch.Tensor, Any]]:
        room = torch.empty(count, requests, dtype=torch.int32, device="cpu")
        return list(zip(room.unbind(), room.numpy(), strict=True))

    return Stock(make, 64)
