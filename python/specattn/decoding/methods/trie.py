"""Drafts from paths of tokens: every request's candidates merged into one tree without repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from specattn.decoding.drafting import Draft
from specattn.tree import Tree

Paths = Iterable[Sequence[int]]


def draft_of_paths(root: torch.Tensor, candidates: Sequence[Paths]) -> Draft:
    """Return the draft that holds each request's candidates and nothing twice.

    Parameters
    ----------
    root : Tensor, int64 [B]
        The last committed tokens.
    candidates : B iterables of sequences of int
        Paths of tokens from below the root. Common beginnings become common nodes, so children of
        one node never carry the same token. A request may have none.

    Returns
    -------
    Draft
        Trees padded to the largest of them; one tree for all where their shapes are the same.
        Nodes come in the order in which the paths first mention them.
    """
    tries = [trie(paths) for paths in candidates]
    size = max(len(parents) for parents, _ in tries)
    tree = shared_tree(tuple(tuple(parents) for parents, _ in tries), root.device)
    drafted = torch.tensor([tokens + [0] * (size - len(tokens)) for _, tokens in tries])
    tokens = drafted.to(root.device)
    tokens[:, 0] = root
    return Draft(tree, tokens)


def trie(paths: Paths) -> tuple[list[int], list[int]]:
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


@lru_cache(maxsize=256)
def shared_tree(shapes: tuple[tuple[int, ...], ...], device: torch.device) -> Tree:
    """Return one tree for all requests or a batch of them, with what follows from it kept."""
    if len(set(shapes)) == 1:
        return Tree(shapes[0]).to(device)
    return Tree.stack([Tree(parents) for parents in shapes]).to(device)
