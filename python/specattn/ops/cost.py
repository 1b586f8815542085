"""The least bytes and operations of a task; every primitive states its own formula.

Every input is read once, every output written once; an operation is one multiplication or one
addition inside a dot product. Softmax is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The sizes a formula speaks of; zero for a part that a call does not have.

    B requests, T query rows, S keys of the tree part, L cached keys read per request (K of them
    when they are gathered), N capacity, Hq and Hk heads, D head_dim, e bytes per element.
    Dv is the head_dim of values, 0 where it is D too.
    """

    B: int
    T: int
    Hq: int
    Hk: int
    D: int
    e: int
    S: int = 0
    L: int = 0
    N: int = 0
    tree_pairs: int = 0  # (row, key) pairs that the tree mask lets through, of one request
    mask_words: int = 0  # int64 words of packed tree mask, over the whole batch
    indices: int = 0  # int32 values read: lengths, block table, positions, over the whole batch
    collected_rows: int = 0
    states: int = 0
    score_rows: int = 0  # rows of [.., N] scores of one request: Hk per head, 1 when shared
    selected: int = 0  # static K of a selection
    Dv: int = 0
    v_in_k: bool = False  # values are a view of the keys, and not read again

    @property
    def queries(self) -> int:
        """Bytes of q."""
        return self.B * self.T * self.Hq * self.D * self.e

    @property
    def state(self) -> int:
        """Bytes of one state: `out` in the type of q, `lse` in float32."""
        return self.B * self.T * self.Hq * (self.v_dim * self.e + 4)

    @property
    def v_dim(self) -> int:
        """The head_dim of values."""
        return self.Dv or self.D

    def keys(self, count: int) -> int:
        """Bytes of that many keys of every request."""
        return self.B * count * self.Hk * self.D * self.e

    def keys_and_values(self, count: int) -> int:
        """Bytes of that many keys and values of every request."""
        columns = self.D if self.v_in_k else self.D + self.v_dim
        return self.B * count * self.Hk * columns * self.e

    def products(self, pairs: int) -> int:
        """Operations of so many (row, key) pairs: a product with a key and one with a value."""
        return 2 * pairs * (self.D + self.v_dim)


@dataclass(frozen=True)
class Cost:
    """Bytes read, bytes written, operations."""

    read: int
    written: int
    operations: int

    @property
    def bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of both tasks; a ragged batch costs what its requests cost."""
        parts = (self.read + other.read, self.written + other.written)
        return Cost(*parts, self.operations + other.operations)
