"""A KV cache whose tokens are sharded over ranks, and attention to all of it.

Every rank attends with the same queries to its own share of the keys; what it gets is a softmax
state, and states over disjoint keys merge into the state over their union (`merge_states`). So per
layer and pass there is one exchange, of outputs and log-sum-exps, and nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from specattn.distributed.group import Buffer, ContextParallel
from specattn.distributed.selection import OwnShares, best_of_all
from specattn.distributed.sharding import Sharding
from specattn.distributed.staging import Staging
from specattn.kv_cache import KVCache, NewHeads, NewRows
from specattn.ops import (
    hybrid_tree_attention,
    merge_state,
    merge_states,
    sparse_gather_attention,
    verify_attention,
)

State = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor], object]
"""Writes a state: out [B, T, Hq, D] and lse [B, T, Hq]."""


class ContextCache(KVCache):
    """One rank's share of the keys and values of a batch of requests; arguments as for `KVCache`.

    Full-attention layers are sharded (`Sharding`). Layers with a sliding window (`windows`, one or
    None for each layer) are replicated in `whole`, a KVCache or None: they attend to few keys, and
    need no exchange. The keys of a pass's own rows are attended to by the last rank (`holds_new`),
    which holds fewest others.

    Rows of a chain are stored at once, each by the rank that its position belongs to. Nodes of a
    tree are staged on every rank, which has computed them all, until `commit` says which stay. Of a
    cache of 8 bits the last rank stages and rounds a chain's rows, too, and attends to what it has
    staged: so a row has the same numbers in the pass that computes it as in all later ones.

    `capacity` is that of all ranks together. `storage` is [full layers, 2, batch, room + 1,
    kv_heads, head_dim]: the last slot takes the rows that belong to others, and is never read.
    Raises ValueError where all layers have a sliding window.
    """

    in_kernels = False

    def __init__(
        self,
        context_parallel: ContextParallel,
        windows: Sequence[int | None],
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        stored: torch.dtype | None = None,
    ):
        full, sliding = windows.count(None), len(windows) - windows.count(None)
        if not full:
            raise ValueError("context parallelism shards full attention; all layers slide here")
        self.ranks = context_parallel
        self.sharding = Sharding(
            context_parallel.rank, context_parallel.size, context_parallel.block_size
        )
        self.room = self.sharding.room(capacity)
        of_layer: Any = (batch, self.room + 1, kv_heads, head_dim)
        options: Any = {"dtype": dtype, "device": device, "stored": stored}
        super().__init__(full, *of_layer, **options)
        self._capacity, self._sliding = capacity, [window is not None for window in windows]
        self.whole: Any = None
        if sliding:
            self.whole = KVCache(sliding, batch, capacity, kv_heads, head_dim, **options)
        self.holds_new = self.sharding.rank == self.sharding.ranks - 1
        self.reads_staged = self.holds_new and stored is not None
        self.reads_new = self.holds_new and stored is None
        self._staging = Staging(full, batch, kv_heads, head_dim, **options)
        self._placed: tuple[NewRows, _Placed] | None = None
        self._shares = OwnShares(self.sharding)
        nothing = torch.zeros(batch, 1, dtype=torch.int32, device=device)
        self._everything = nothing, nothing[:, 0] - 1

    @property
    def capacity(self) -> int:
        """N: the tokens that one request can hold, on all ranks together."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take on this rank."""
        return self.storage.nbytes + (0 if self.whole is None else self.whole.nbytes)

    @property
    def width(self) -> int:
        """Entries of collected scores: one for each of this rank's slots."""
        return self.room

    def held(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return how many of the first `lengths` [B] tokens this rank holds."""
        return self.sharding.held(lengths)

    def place(self, layer: int) -> int:
        """Return which of its kind a layer is, full or with a window: its index in `storage`."""
        layer %= len(self._sliding)
        return self._sliding[:layer].count(self._sliding[layer])

    def rows(self, index: int) -> torch.Tensor:
        """Return this rank's share of a full-attention layer, [2, B, room, Hk, ..]."""
        return super().rows(index)[:, :, : self.room]

    def places(self, slots: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return slots of this rank as `write_kv` takes them, which leaves out others' rows."""
        requests, own = slots
        return (requests * self.room + own).masked_fill(own == self.room, -1)

    def attend(
        self,
        new: NewHeads,
        *,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> State:
        """Do what `KVCache.attend` does."""
        if self._sliding[new.layer]:
            new = new._replace(layer=self.place(new.layer))
            return self.whole.attend(new, window=window, sinks=sinks, **options)
        return merge_states(*self._states(new, sinks, options))

    def attend_split(
        self,
        new: NewHeads,
        first: int,
        *,
        cu_seqlens_q: torch.Tensor,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend from this rank's share of ragged rows, causal chains: [share, heads, D].

        `new` has that share. All are equally large, this one begins at `first`; what lies behind
        the last row means nothing. Queries, keys and values of all are exchanged first.
        """
        layer, q, k, v, rows = new
        count, share = len(rows.slots[1]), len(q)
        own = slice(min(first, count), min(first + share, count))
        if self._sliding[layer]:
            number = self.place(layer)
            keys, values = self._all_rows(count, k, v)
            self.whole.write(number, keys, values, rows.slots)
            if own.start == own.stop:
                return torch.zeros_like(q)
            # To a row here, those of its request in earlier shares are a prefix like any other.
            begin, end = cu_seqlens_q[:-1], cu_seqlens_q[1:]
            prefix = rows.prefix + (end.clamp(max=own.start) - begin).clamp_min(0)
            options |= _read(self.whole, number, rows.max_seqlen)
            options["cu_seqlens_q"] = cu_seqlens_q.clamp(own.start, own.stop) - own.start
            options |= {"cache_seqlens": prefix, "k_tree": None, "v_tree": None}
            q = q[: own.stop - own.start]
            out, _ = hybrid_tree_attention(q, window=window, sinks=sinks, **options)
        else:
            q_all, k_all, v_all = self._all_rows(count, q, k, v)
            options["cu_seqlens_q"] = cu_seqlens_q
            outs, lses = self._states(NewHeads(layer, q_all, k_all, v_all, rows), sinks, options)
            if own.start == own.stop:
                return torch.zeros_like(q)
            out = merge_states(outs[:, None, own], lses[:, None, own])[0][0]
        return pad(out, (0, 0, 0, 0, 0, share - len(out)))

    def attend_and_collect(
        self, new: NewHeads, *, sinks: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do what `KVCache.attend_and_collect` does; collected are this rank's tokens."""
        placed = self._store(new)
        read = _read(self, new.layer) | {"cache_seqlens": placed.prefix, **options}
        read |= {"k_tree": new.k, "v_tree": new.v, "sinks": sinks if self.reads_new else None}
        read["tree_mask"] = new.rows.tree_mask if self.reads_new else placed.unseen
        collected = []

        def attend(out: torch.Tensor, lse: torch.Tensor) -> None:
            collected.append(verify_attention(new.q, out=out, lse=lse, **read)[2])

        both = self._and_to_staged(attend, new, placed, sinks, options)
        return *self._merged(new.q, both), collected[0]

    def attend_selected(
        self,
        new: NewHeads,
        indices: torch.Tensor,
        lengths: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> State:
        """Do what `KVCache.attend_selected` does: every rank attends to those that it holds."""
        self._store(new)
        selected = self._shares.of(new.layer, indices, lengths)
        tree = (new.k, new.v) if self.holds_new else (None, None)
        options |= _read(self, new.layer) | dict(zip(("k_new", "v_new"), tree, strict=True))
        options |= dict(zip(("indices", "index_lengths"), selected, strict=True))
        options["sinks"] = sinks if self.holds_new else None
        return self._merged(
            new.q, lambda out, lse: sparse_gather_attention(new.q, out=out, lse=lse, **options)
        )

    def attend_committed(
        self, layer: int, q: torch.Tensor, seqlens: torch.Tensor, unseen: torch.Tensor
    ) -> State:
        """Do what `KVCache.attend_committed` does."""
        if self._sliding[layer]:
            return self.whole.attend_committed(self.place(layer), q, seqlens, unseen)
        read = {"cache_seqlens": self.sharding.held(seqlens), **_read(self, layer)}
        return self._merged(q, lambda out, lse: self._attend_to_prefix(q, out=out, lse=lse, **read))

    def importance_scores(
        self, layer: int, q: torch.Tensor, seqlens: torch.Tensor, longest: int | None = None
    ) -> torch.Tensor:
        """Return what `KVCache.importance_scores` does: every rank scores its own tokens."""
        own = super().importance_scores(layer, q, self.sharding.held(seqlens))
        return self.gathered(own)[..., :longest]

    def gathered(self, scores: torch.Tensor, unit: int = 1) -> torch.Tensor:
        """Return the scores of all tokens, [..., N // unit], given those of this rank's.

        Raises ValueError unless the sharded blocks are a multiple of `unit`.
        """
        if self.sharding.block % unit:
            raise ValueError(
                f"pages of {unit} tokens need a block_size that is a multiple, got "
                f"{self.sharding.block}"
            )
        (parts,) = self.ranks.gather("scores", scores)
        return self.sharding.in_order(parts, self.capacity // unit, unit)

    def select_topk(self, scores: torch.Tensor, seqlens: torch.Tensor, **share: Any) -> State:
        """Select by this rank's scores and by those of all others (`best_of_all`)."""
        each, rows = scores.shape[:-1], scores.flatten(0, -2)  # KV heads are texts of their own
        seqlens = seqlens.repeat_interleave(len(rows) // len(seqlens))
        found = best_of_all(self.ranks, self.sharding, self.capacity, rows, seqlens, **share)
        return found[0].unflatten(0, each), found[1].unflatten(0, each)

    def commit(
        self,
        nodes: torch.Tensor,
        counts: torch.Tensor,
        *,
        in_place: bool = False,
        on_host: Sequence[int] | None = None,
    ) -> None:
        """Keep the root and the accepted nodes of a verified tree, each where it belongs."""
        if self.whole is not None:
            self.whole.seqlens = self.seqlens
            self.whole.commit(nodes, counts, in_place=in_place)
        if not in_place:
            path = pad(nodes.clamp_min(0), (1, 0))
            requests, positions = self.slots(path.shape[1])
            keep = torch.arange(path.shape[1], device=path.device) <= counts[:, None]
            slots = self._own_slots(positions, keep)
            self.storage[:, :, requests, slots] = self._staging.nodes.storage[:, :, requests, path]
        self.seqlens = self.seqlens + (counts + 1).to(torch.int32)

    def retire(self, finished: Sequence[bool]) -> list[int]:
        """Drop the finished requests, as `KVCache.retire` does."""
        if self.whole is not None:
            self.whole.seqlens = self.seqlens
            self.whole.retire(finished)
        rows = super().retire(finished)
        self._staging.retire(finished)
        self._everything = self._everything[0][: len(rows)], self._everything[1][: len(rows)]
        return rows

    def placing(self, prefix: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how much of `prefix` this rank holds, and where `write_kv` puts the rows behind.

        Both int32 on the CPU: [B] and [B, count], -1 for rows that belong to others. Computed in
        plain numbers: for few rows faster than a tensor operation.
        """
        sharding, prefixes = self.sharding, prefix.tolist()
        places = [
            [
                sharding.slots(at) + request * self.room if sharding.is_mine(at) else -1
                for at in range(length, length + count)
            ]
            for request, length in enumerate(prefixes)
        ]
        held = [sharding.held(length) for length in prefixes]
        on_host: Any = {"dtype": torch.int32, "device": "cpu"}
        return torch.tensor(held, **on_host), torch.tensor(places, **on_host)

    def staging(self, layer: int, count: int, chain: bool) -> tuple[KVCache, int]:
        """Return where `count` new rows of a layer are staged: in which layer of what cache."""
        return self._staging.room(self.place(layer), count, chain)

    def state_buffer(self, q: torch.Tensor) -> Buffer:
        """Return memory for the states of all ranks, given queries [B, T, Hq, D]."""
        lse = torch.promote_types(q.dtype, torch.float32)
        parts = [(tuple(q.shape), q.dtype), (tuple(q.shape[:-1]), lse)]
        return self.ranks.buffer(parts, q.device)

    def exchange_states(self, buffer: Buffer) -> None:
        """Write the states of all ranks to ``buffer.all``; each has its own in ``buffer.own``."""
        self.ranks.exchange(buffer, "attention")

    def _own_slots(self, positions: torch.Tensor, keep: torch.Tensor | bool = True) -> torch.Tensor:
        """Return this rank's slots of its own tokens; others go to the slot that is never read."""
        mine = self.sharding.is_mine(positions) & keep
        return torch.where(mine, self.sharding.slots(positions), self.room)

    def _store(self, new: NewHeads) -> _Placed:
        """Store new keys and values of a full-attention layer."""
        if self._placed is None or self._placed[0] is not new.rows:
            self._placed = new.rows, self._place(new.rows, new.k.shape[1])
        placed = self._placed[1]
        if new.rows.tree_mask is None:
            self.write(new.layer, new.k, new.v, placed.slots)
        else:
            self._stage(new, placed)
        return placed

    def _stage(self, new: NewHeads, placed: _Placed) -> tuple[KVCache, int]:
        """Stage the new rows of a layer; return where."""
        chain = new.rows.tree_mask is None
        staged, place = self.staging(new.layer, placed.most, chain)
        staged.write(place, new.k, new.v, placed.staged)
        return staged, place

    def _place(self, rows: NewRows, count: int) -> _Placed:
        requests, positions = rows.slots
        words = -(-count // 64)
        unseen = torch.zeros(count, words, dtype=torch.int64, device=positions.device)
        staged = positions - rows.prefix[requests]
        most = count if positions.dim() == 2 else int(staged.max()) + 1
        own, prefix = self._own_slots(positions), self.sharding.held(rows.prefix)
        return _Placed((requests, own), prefix, unseen, most, (requests, staged))

    def _all_rows(self, count: int, *own: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows [count, ...] of which every rank has a share."""
        return [part.flatten(0, 1)[:count] for part in self.ranks.gather("rows", *own)]

    def _states(self, new: NewHeads, sinks: torch.Tensor | None, options: dict[str, Any]) -> State:
        """Store new keys and values; return the states of all ranks, [ranks, B, T, ...]."""
        placed = self._store(new)
        read = _read(self, new.layer, self.sharding.room(new.rows.max_seqlen))
        read |= {"cache_seqlens": placed.prefix, **options}
        tree: Any = {"k_tree": new.k, "v_tree": new.v}
        tree |= {"tree_mask": new.rows.tree_mask, "sinks": sinks}

        def attend(out: torch.Tensor, lse: torch.Tensor) -> None:
            if self.reads_new:
                hybrid_tree_attention(new.q, out=out, lse=lse, **read, **tree)
            else:
                self._attend_to_prefix(new.q, out=out, lse=lse, **read)

        return self._exchanged(new.q, self._and_to_staged(attend, new, placed, sinks, options))

    def _attend_to_prefix(self, q: torch.Tensor, **options: Any) -> None:
        indices, lengths = self._everything
        sparse_gather_attention(q, indices=indices, index_lengths=lengths, **options)

    def _and_to_staged(
        self,
        attend: Attend,
        new: NewHeads,
        placed: _Placed,
        sinks: torch.Tensor | None,
        options: dict[str, Any],
    ) -> Attend:
        """Return what attends to the new rows, too, as they are stored; `attend` if not here."""
        if not self.reads_staged:
            return attend
        names = ("softmax_scale", "softcap", "cu_seqlens_q", "max_seqlen_q")
        read: Any = {name: options[name] for name in names if name in options}
        chain = new.rows.tree_mask is None
        staged = self._stage(new, placed) if chain else self.staging(new.layer, placed.most, chain)
        read |= _read(*staged, placed.most)
        read |= {"cache_seqlens": torch.zeros_like(placed.prefix), "sinks": sinks}
        read |= {"k_tree": None, "v_tree": None, "tree_mask": new.rows.tree_mask}

        def both(out: torch.Tensor, lse: torch.Tensor) -> None:
            prefix = torch.empty_like(out), torch.empty_like(lse)
            attend(*prefix)
            states = [*prefix, *hybrid_tree_attention(new.q, **read), out, lse]
            if out.dim() == 3:  # of ragged rows
                states = [x[None] for x in states]
            merge_state(*states[:4], out=states[4], lse=states[5])

        return both

    def _merged(self, q: torch.Tensor, attend: Attend) -> State:
        """Let every rank attend to its keys, and return the state over all of them."""
        return merge_states(*self._exchanged(q, attend))

    def _exchanged(self, q: torch.Tensor, attend: Attend) -> State:
        """Let every rank attend to its keys, and return the states of all."""
        buffer = self.state_buffer(q)
        attend(*buffer.own)
        self.exchange_states(buffer)
        outs, lses = buffer.all
        return outs, lses


class _Placed(NamedTuple):
    """Where the new rows of a pass go on this rank, and how much of the prefix it holds."""

    slots: tuple[torch.Tensor, torch.Tensor]
    prefix: torch.Tensor
    unseen: torch.Tensor  # a mask, packed: for ranks that do not attend to the new rows
    most: int  # new rows of a request
    staged: tuple[torch.Tensor, torch.Tensor]  # where they are staged


def _read(cache: KVCache, layer: int, most: int | None = None) -> dict[str, Any]:
    """Return a layer's keys, values and scales by the primitives' names, the first `most`."""
    k, v = cache.layer(layer)
    read = {"k_cache": k, "v_cache": v, **cache.scales(layer)}
    return {name: x[:, :most] for name, x in read.items()}
