"""Drafts from paths of tokens: every request's candidates merged into one tree without repeats."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from specattn.decoding.engine.contract import Draft
from specattn.decoding.text.draws import uploaded
from specattn.tree import Tree

Paths = Iterable[Sequence[int]]
Trie = tuple[list[int], list[int]]
"""Parents and tokens of its nodes."""


def draft_of_paths(root: torch.Tensor, candidates: Sequence[Paths]) -> Draft:
    """Return the draft of each request's candidates, paths of tokens from below its root [B].

    Common beginnings become common nodes, so children of one node never carry the same token. Trees
    are padded to the largest, and are one for all where their shapes are the same. Nodes come in
    the order in which the paths first mention them.
    """
    return draft_of_tries(root, [trie(paths) for paths in candidates])


def draft_of_tries(root: torch.Tensor, tries: Sequence[Trie]) -> Draft:
    """Return the draft of each request's trie; arguments as for `draft_of_paths`."""
    size = max(len(parents) for parents, _ in tries)
    tree = shared_tree(tuple(tuple(parents) for parents, _ in tries), root.device)
    tokens = uploaded([tokens + [0] * (size - len(tokens)) for _, tokens in tries], root.device)
    tokens[:, 0] = root
    return Draft(tree, tokens)


def trie(paths: Paths) -> Trie:
    """Return parents and tokens of the nodes of a trie; node 0 is the root, of token 0."""
    parents, tokens = [-1], [0]
    numbers: dict[tuple[int, int], int] = {}
    for path in paths:
        node = 0
        for token in path:
            child = numbers.setdefault((node, token), len(parents))
            if child == len(parents):
                parents.append(node)
                tokens.append(token)
            node = child
    return parents, tokens


def best_of_trie(whole: Trie, probabilities: Sequence[float], count: int) -> Trie:
    """Return the trie of the `count` most probable drafted nodes of another.

    `probabilities` are those of all nodes but the root; a parent's is at least its child's.
    """
    parents, tokens = whole
    order = sorted(range(1, len(parents)), key=lambda node: -probabilities[node - 1])[:count]
    chosen = [0, *sorted(order)]
    number = {node: at for at, node in enumerate(chosen)}
    return [-1, *(number[parents[n]] for n in chosen[1:])], [tokens[n] for n in chosen]


def common(path: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False))
    return sum(1 for _ in same)


def followed(parents: Sequence[int], tokens: Sequence[int], path: Sequence[int]) -> int:
    """Return how many tokens of `path` a tree has one below the other, behind its root."""
    below = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=False))}
    node, count = 0, 0
    for token in path:
        if (found := below.get((node, token))) is None:
            break
        node, count = found, count + 1
    return count


@lru_cache(maxsize=256)
def shared_tree(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Tree:
    """Return one tree for all requests or a batch of them, with what follows from it kept."""
    alike = len(set(shapes)) == 1
    tree = Tree(shapes[0]) if alike else Tree.stack([Tree(parents) for parents in shapes])
    if device.type == "cpu":
        return tree
    parents = uploaded(tree.parent_lists[0] if alike else tree.parent_lists, device)
    return Tree(parents, max_depth=tree.max_depth, max_width=tree.max_width)
