"""One preallocated, ragged key/value cache for all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVCache:
    """Keys and values of a batch of requests, each of its own length.

    Everything lies in one tensor, so that accepting a path of a tree is one move over all layers.
    What stands at or beyond a request's length is unspecified and never read: rejected tokens need
    no cleaning up, they are overwritten.

    Parameters
    ----------
    layers, batch, capacity, kv_heads, head_dim : int
        `capacity` is the number of tokens that one request can hold, drafted ones included.
    dtype : torch.dtype
    device : torch.device or str

    Attributes
    ----------
    storage : Tensor [layers, 2, batch, capacity, kv_heads, head_dim]
        Keys at index 0 of the second dimension, values at index 1.
    seqlens : Tensor, int32 [batch]
        Tokens that are committed. Replaced, never changed in place, so it may be kept.
    """

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
    ):
        shape = (layers, 2, batch, capacity, kv_heads, head_dim)
        if min(shape) < 1:
            raise ValueError(
                "layers, batch, capacity, kv_heads and head_dim must be positive, got "
                f"{layers}, {batch}, {capacity}, {kv_heads}, {head_dim}"
            )
        self.storage = torch.empty(shape, dtype=dtype, device=device)
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=device)

    @property
    def batch_size(self) -> int:
        """B: the requests that are still alive."""
        return self.storage.shape[2]

    @property
    def capacity(self) -> int:
        """N: the tokens that one request can hold."""
        return self.storage.shape[3]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one layer's keys and values, each [B, N, Hk, D]."""
        k, v = self.storage[index]
        return k, v

    def slots(
        self, count: int, offset: int | torch.Tensor = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the `count` rows at ``seqlens + offset`` of every request lie.

        `offset` may be one for each request, integer [B].
        Computed once per pass and given to `write` for every layer.

        Returns
        -------
        requests : Tensor, int64 [B, 1]
        positions : Tensor, int64 [B, count]
            They are also the tokens' positions in the text, where rows follow one another.
        """
        device = self.storage.device
        requests = torch.arange(self.batch_size, device=device)[:, None]
        first = self.seqlens + offset
        return requests, first[:, None] + torch.arange(count, device=device)

    def write(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Store new keys and values, each [B, T, Hk, D], at `slots`; lengths stay as they are.

        Raises
        ------
        IndexError
            On the CPU, when a position is beyond the capacity.
        """
        self.storage[layer, 0][slots] = k
        self.storage[layer, 1][slots] = v

    def commit(self, nodes: torch.Tensor, counts: torch.Tensor, *, in_place: bool = False) -> None:
        """Keep the root and the accepted nodes of a verified tree, in all layers at once.

        Node n of the tree lies at ``seqlens + n``. Its accepted path is moved to follow the root
        without gaps.

        Parameters
        ----------
        nodes : Tensor, int64 [B, depth]
            Accepted nodes along one path, without the root, padded with -1.
        counts : Tensor, integer [B]
            How many nodes are accepted.
        in_place : bool
            The tree was a chain: its accepted nodes already lie where they belong.
        """
        if not in_place and self.storage.device.type == "cpu":
            self._move_each(nodes.tolist(), counts.tolist())
        elif not in_place and nodes.shape[1]:
            requests, kept = self.slots(nodes.shape[1], offset=1)
            source = torch.where(nodes < 0, kept, self.seqlens[:, None] + nodes)
            self.storage[:, :, requests, kept] = self.storage[:, :, requests, source]
        self.seqlens = self.seqlens + (counts + 1).to(torch.int32)

    def _move_each(self, nodes: list[list[int]], counts: list[int]) -> None:
        """Move the accepted paths, request by request: a few rows are copied in a few calls."""
        for request, (path, count) in enumerate(zip(nodes, counts, strict=True)):
            path = path[:count]
            if path == list(range(1, count + 1)):
                continue  # they lie there already
            root, rows = int(self.seqlens[request]), self.storage[:, :, request]
            source = torch.tensor(path) + root
            rows[:, :, root + 1 : root + 1 + count] = rows.index_select(2, source)

    def retire(self, finished: Sequence[bool]) -> list[int]:
        """Drop the finished requests, so that they cost nothing from now on.

        The last survivors move into the holes; the rest stay where they are.

        Parameters
        ----------
        finished : sequence of bool, B long

        Returns
        -------
        list of int
            The former row of every request that is left, by which whatever else is kept per request
            must be indexed.
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
