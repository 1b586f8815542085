"""A heap whose equal nodes leave it in the order of C++'s, as the drafts of our kernel do."""

from __future__ import annotations

from typing import Protocol, TypeVar


class Likely(Protocol):
    """What a heap orders."""

    @property
    def probability(self) -> float:
        """The greatest one leaves first."""


_Node = TypeVar("_Node", bound=Likely)


def push(heap: list[_Node], node: _Node) -> None:
    """Add a node to a heap, as C++'s ``push_heap`` does: so equal ones leave it in its order."""
    heap.append(node)
    _rise(heap, len(heap) - 1, node)


def pop(heap: list[_Node]) -> _Node:
    """Take the most probable node out of a heap, as ``pop_heap`` does."""
    top, node = heap[0], heap.pop()
    hole, size = 0, len(heap)
    if not size:
        return top
    while (child := 2 * hole + 2) < size:
        child -= heap[child].probability < heap[child - 1].probability
        heap[hole], hole = heap[child], child
    if child == size:
        heap[hole], hole = heap[child - 1], child - 1
    _rise(heap, hole, node)
    return top


def _rise(heap: list[_Node], hole: int, node: _Node) -> None:
    while hole and heap[above := (hole - 1) // 2].probability < node.probability:
        heap[hole], hole = heap[above], above
    heap[hole] = node
