"""Trees of drafted tokens: parents, and the depths, masks and paths that follow from them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, partial

import torch

from .reference.tree_mask import pack_tree_mask

_ROOT, _PADDING = -1, -1


class Tree:
    """A tree of drafted tokens, or a batch of trees of one size.

    Node 0 is the root: the last committed token, which is verified together with the drafted tokens
    but is not one of them. Every other node is a drafted token that continues its parent's path.
    Siblings are ordered by index. A node ``n > 0`` whose parent is -1 is *padding*: it fills a
    batch of trees up to one size, nothing follows it and it can never be accepted.

    Everything is computed on the device of `parents` at first use and kept. After construction
    nothing waits for the device.

    Parameters
    ----------
    parents : Tensor or nested sequence of int, shape [T] or [B, T]
        ``parents[0] == -1``, and every parent comes before its children. [T]: one tree, shared by
        all requests of a batch. [B, T]: one tree per request.
    max_depth, max_width : int, optional
        Upper bounds of the depth of a node and of the number of children of a node. They are the
        lengths of the loops that walk the tree, so they must be known on the host. By default they
        are counted, which waits once for the device where `parents` lies on a GPU; with both given,
        nothing waits.
    trusted : bool
        Look at no values on a CPU either: for trees that follow from a rule, bounds given.

    Attributes
    ----------
    parents : Tensor, int64 [T] or [B, T]
    max_depth, max_width : int

    Raises
    ------
    TypeError
        `parents` does not hold integers.
    ValueError
        `parents` is no tree, or the tree exceeds a given bound. On a GPU, and of trusted trees,
        values are looked at only when the environment has ``SPECATTN_CHECK=1``.

    Examples
    --------
    Two tokens behind the root, and two behind the first of them:

    >>> tree = Tree([-1, 0, 0, 1, 1])
    >>> tree.depths.tolist()
    [0, 1, 1, 2, 2]
    >>> tree.mask[4].int().tolist()  # row 4 sees the root, its parent and itself
    [1, 1, 0, 0, 1]
    """

    def __init__(
        self,
        parents: torch.Tensor | Sequence[int] | Sequence[Sequence[int]],
        *,
        max_depth: int | None = None,
        max_width: int | None = None,
        trusted: bool = False,
    ):
        where = parents.device if isinstance(parents, torch.Tensor) else "cpu"
        given = torch.as_tensor(parents, device=where)
        if given.dim() not in (1, 2) or 0 in given.shape:
            raise ValueError(f"parents must be [T] or [B, T], not empty, got {list(given.shape)}")
        if given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"parents must be int32 or int64, got {given.dtype}")
        self.parents = given.to(torch.int64, copy=True)
        looked_at = given.device.type == "cpu" and not trusted
        if looked_at or os.environ.get("SPECATTN_CHECK") == "1":
            _check_parents(self.parent_lists, batched=given.dim() == 2)
            depth, width = self._count_depth(), self._count_width()
            self.max_depth = _bound("max_depth", max_depth, depth)
            self.max_width = _bound("max_width", max_width, width)
        else:
            self.max_depth = self._count_depth() if max_depth is None else max_depth
            self.max_width = self._count_width() if max_width is None else max_width

    @classmethod
    def chain(cls, n: int, *, device: torch.device | str | None = None) -> Tree:
        """Return the root and `n` drafted tokens, one after the other: ``size == n + 1``."""
        if n < 0:
            raise ValueError(f"n must be the number of drafted tokens, >= 0, got {n}")
        parents = torch.arange(-1, n, device=device)
        return cls(parents, max_depth=n, max_width=min(n, 1))

    @classmethod
    def full(cls, widths: Sequence[int], *, device: torch.device | str | None = None) -> Tree:
        """Return the tree in which every node at depth ``i`` has ``widths[i]`` children.

        ``Tree.full([1, 3, 3, 3])`` is TokenSwift's tree of 1 + 3 + 9 + 27 drafted tokens (and the
        root). Nodes are numbered level by level, so child ``r`` of a level's node ``j`` is number
        ``j * widths[i] + r`` of the next level.
        """
        parents, level = [_ROOT], [0]
        for width in widths:
            if width < 1:
                raise ValueError(f"widths must be positive, got {list(widths)}")
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(parents).to(device)

    @classmethod
    def grown(
        cls,
        parents: torch.Tensor,
        *,
        depths: torch.Tensor,
        packed_mask: torch.Tensor,
        max_depth: int,
        max_width: int,
    ) -> Tree:
        """Return a tree whose depths and mask are given, as its attributes have them; unchecked."""
        tree = cls(parents, max_depth=max_depth, max_width=max_width, trusted=True)
        tree.depths, tree.packed_mask = depths, packed_mask
        return tree

    @classmethod
    def from_paths(
        cls,
        paths: Iterable[Sequence[int]],
        *,
        device: torch.device | str | None = None,
    ) -> Tree:
        """Return the tree whose nodes are the given paths from the root and all their prefixes.

        This reads the choice lists that Medusa and EAGLE publish, in which ``(0, 2)`` is the
        third-best continuation of the best first token; leaves alone are enough. Any labels serve:
        from n-grams of token ids it builds their trie, in which a common beginning appears once.

        Nodes are ordered by length, then lexicographically: node ``n`` is
        ``sorted(all_prefixes, key=lambda path: (len(path), path))[n]``, the root the empty path.
        """
        prefixes = {tuple(path[:length]) for path in paths for length in range(len(path) + 1)}
        nodes = sorted(prefixes | {()}, key=lambda path: (len(path), path))
        number = {path: n for n, path in enumerate(nodes)}
        return cls([_ROOT] + [number[path[:-1]] for path in nodes[1:]]).to(device)

    @classmethod
    def stack(cls, trees: Sequence[Tree], *, size: int | None = None) -> Tree:
        """Return a batch of single trees, padded to `size` nodes (default: the largest of them)."""
        if not trees or any(tree.batch_size is not None for tree in trees):
            raise ValueError("stack needs one or more trees, none of which is a batch")
        needed = max(tree.size for tree in trees)
        size = needed if size is None else size
        if size < needed:
            raise ValueError(f"size must be at least the largest tree's, {needed}, got {size}")
        pad = partial(torch.nn.functional.pad, value=_PADDING)
        return cls(
            torch.stack([pad(tree.parents, (0, size - tree.size)) for tree in trees]),
            max_depth=max(tree.max_depth for tree in trees),
            max_width=max(tree.max_width for tree in trees),
        )

    def to(self, device: torch.device | str | None) -> Tree:
        """Return the same tree on another device (itself where it is already there)."""
        parents = self.parents if device is None else self.parents.to(device)
        if parents is self.parents:
            return self
        return Tree(parents, max_depth=self.max_depth, max_width=self.max_width)

    @property
    def size(self) -> int:
        """T: the number of nodes, with the root and padding."""
        return self.parents.shape[-1]

    @property
    def batch_size(self) -> int | None:
        """B, or None for one tree that every request shares."""
        return self.parents.shape[0] if self.parents.dim() == 2 else None

    @property
    def device(self) -> torch.device:
        """Where the tree lies."""
        return self.parents.device

    @cached_property
    def valid(self) -> torch.Tensor:
        """Bool [T] or [B, T]: the nodes that are not padding."""
        return (self.parents >= 0) | (self._numbers == 0)

    @cached_property
    def depths(self) -> torch.Tensor:
        """Int32 [T] or [B, T]: steps from the root, the node's position less that of the root.

        Padding has depth 0.
        """
        if self.device.type == "cpu":
            depths = [_depths(parents) for parents in self.parent_lists]
            return torch.tensor(depths, dtype=torch.int32, device="cpu").view(self.parents.shape)
        ancestor = self._ancestor_or_end
        steps = (ancestor < self.size).to(torch.int32)
        for _ in range((self.size - 1).bit_length()):  # each round doubles the steps looked back
            steps = steps + steps.gather(-1, ancestor)
            ancestor = ancestor.gather(-1, ancestor)
        return steps[..., :-1]

    @cached_property
    def parent_lists(self) -> list[list[int]]:
        """`parents` on the host, a list of T for each tree; waits for the device."""
        return self.parents.reshape(-1, self.size).tolist()

    @cached_property
    def drafted_and_depth(self) -> list[tuple[int, int]]:
        """How many tokens each of `parent_lists` drafts, and how deep; waits for the device."""
        return [
            (len(parents) - parents.count(-1), max(_depths(parents)))
            for parents in self.parent_lists
        ]

    @property
    def is_chain(self) -> bool:
        """Whether it is one path, shared by all requests: causal, and already in order."""
        return self.batch_size is None and self.max_depth == self.size - 1

    @cached_property
    def mask(self) -> torch.Tensor:
        """Bool [T, T] or [B, T, T]: row n sees node n and its ancestors. Padding sees itself."""
        size, ancestor = self.size, self._ancestor_or_end
        seen = torch.eye(size + 1, size, dtype=torch.bool, device=self.device)
        seen = seen.expand(*ancestor.shape, size)
        for _ in range(self.max_depth.bit_length()):
            seen = seen | seen.gather(-2, ancestor[..., None].expand_as(seen))
            ancestor = ancestor.gather(-1, ancestor)
        return seen[..., :-1, :]

    @cached_property
    def packed_mask(self) -> torch.Tensor:
        """Int64 [T, W] or [B, T, W], W = ceil(T / 64): `mask`, bit j of word w for node 64w + j."""
        if self.device.type == "cpu":
            words = (self.size + 63) // 64
            packed = bytearray().join(_seen(own, 8 * words) for own in self.parent_lists)
            return torch.frombuffer(packed, dtype=torch.int64).view(*self.parents.shape, words)
        return pack_tree_mask(self.mask)

    @cached_property
    def paths(self) -> torch.Tensor:
        """Int64 [T, max_depth + 1] or [B, T, max_depth + 1]: each node's path from the root.

        Entry ``[n, d]`` is the ancestor of node n at depth d (itself at its own depth), and -1
        beyond. ``paths[is_leaf]`` are the root-to-leaf paths that others call retrieve indices.
        """
        ends = self.max_depth + 1
        at = torch.where(self.mask, self.depths[..., None, :].clamp_max(ends).long(), ends)
        paths = at.new_full((*at.shape[:-1], ends + 1), -1)
        paths = paths.scatter(-1, at, self._numbers.expand_as(at))[..., :-1]
        return torch.where(self.valid[..., None], paths, -1)

    @cached_property
    def children(self) -> torch.Tensor:
        """Int64 [T, max_width] or [B, T, max_width]: each node's children by index, then -1."""
        size, width = self.size, self.max_width
        same = self.parents[..., :, None] == self.parents[..., None, :]
        rank = same.tril(-1).sum(-1)
        kept = (self.parents >= 0) & (rank < width)
        slot = torch.where(kept, self.parents * width + rank, size * width)
        table = slot.new_full((*slot.shape[:-1], size * width + 1), -1)
        table = table.scatter(-1, slot, self._numbers.expand_as(slot))
        return table[..., :-1].unflatten(-1, (size, width))

    @cached_property
    def is_leaf(self) -> torch.Tensor:
        """Bool [T] or [B, T]: the nodes that nothing follows, without padding."""
        followed = self._ancestor_or_end.new_zeros(self._ancestor_or_end.shape, dtype=torch.bool)
        followed = followed.scatter(-1, self._ancestor_or_end, True)[..., :-1]
        return self.valid & ~followed

    @cached_property
    def _numbers(self) -> torch.Tensor:
        return torch.arange(self.size, device=self.device)

    @cached_property
    def _ancestor_or_end(self) -> torch.Tensor:
        """Parents with T in place of -1, and one more node T that is its own parent."""
        ends = torch.where(self.parents < 0, self.size, self.parents)
        return torch.nn.functional.pad(ends, (0, 1), value=self.size)

    def _count_depth(self) -> int:
        return max(depth for _, depth in self.drafted_and_depth)

    def _count_width(self) -> int:
        siblings = (Counter(p for p in parents if p >= 0) for parents in self.parent_lists)
        return max(max(counts.values(), default=0) for counts in siblings)

    def __repr__(self) -> str:
        batch = "" if self.batch_size is None else f"batch_size={self.batch_size}, "
        return (
            f"Tree({batch}size={self.size}, max_depth={self.max_depth}, "
            f"max_width={self.max_width}, device={self.device})"
        )


def _depths(parents: list[int]) -> list[int]:
    depths = list[int]()
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _seen(parents: list[int], row_bytes: int) -> bytes:
    """Return the packed rows of one tree's mask."""
    rows = list[int]()
    for node, parent in enumerate(parents):
        rows.append(1 << node | (0 if parent < 0 else rows[parent]))
    return b"".join(row.to_bytes(row_bytes, "little") for row in rows)


def _check_parents(trees: list[list[int]], *, batched: bool) -> None:
    """Raise ValueError naming the first entry that makes `parents` no tree."""
    for request, parents in enumerate(trees):
        for node, parent in enumerate(parents):
            if node == 0 and parent != _ROOT:
                rule = "node 0 is the root, whose parent must be -1"
            elif parent < -1:
                rule = "a parent must be an earlier node, or -1 for padding"
            elif parent >= node:
                rule = "a parent must come before its children"
            elif parent > 0 and parents[parent] == _PADDING:
                rule = "nothing may follow padding"
            else:
                continue
            where = f"{request}, {node}" if batched else node
            raise ValueError(f"{rule}; got parents[{where}] = {parent}")


def _bound(name: str, given: int | None, counted: int) -> int:
    if given is not None and given < counted:
        raise ValueError(f"{name} must be at least the tree's own, {counted}, got {given}")
    return counted if given is None else given
