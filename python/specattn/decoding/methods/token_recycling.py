"""Token recycling: draft a tree from the tokens that the target last ranked best after each token.

Every verification ranks what could follow each of its nodes, accepted or not. A table keeps the
best few per token of the vocabulary, and the next tree is read from it. (Luo et al., *Turning Trash
into Treasure*, arXiv 2408.08696.)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specattn.decoding.drafting.calibrating import pass_sizes
from specattn.decoding.drafting.gains import SIZES, Effort, Nodes, TreeGains
from specattn.decoding.drafting.pace import FixedSize, PacedDrafter, Share
from specattn.decoding.drafting.trie import shared_tree
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.engine.method import Method
from specattn.decoding.text.draws import uploaded
from specattn.tree import Tree


@dataclass(frozen=True)
class TokenRecycling(Method, name="token_recycling"):
    """Drafting from a table of successors, [V, k], that every verification refreshes.

    All requests of a run read and write one table, which starts empty. The tree is that of the best
    of all paths of ranks, when each rank is taken to be half as likely as the one before it.

    Parameters
    ----------
    nodes : int or None
        Drafted tokens per round. None: up to 64, as many as gain the most tokens per second by the
        times of the run's own passes, or none.
    depth : int
        Longest path.
    k : int
        Successors that are kept of each token.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    nodes: int | None = None
    depth: int = 6
    k: int = 8

    def __post_init__(self) -> None:
        self._require(1, "nodes", "depth", "k")

    @property
    def max_nodes(self) -> int:
        """The root and the drafted tokens."""
        return SIZES[-1] if self.nodes is None else self.nodes + 1

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter whose table is empty."""
        return _RecyclingDrafter(self, context)


class _RecyclingDrafter(PacedDrafter):
    def __init__(self, method: TokenRecycling, context: DraftContext):
        target, self.sequences = context.target, context.sequences
        vocabulary, device = target.model.config.vocab_size, target.device
        k = min(method.k, vocabulary)
        # Token 0 follows what was never seen: a guess as good as any.
        self.successors = torch.zeros(vocabulary, k, dtype=torch.int32, device=device)
        self.paths = best_rank_paths(method.max_nodes - 1, method.depth, k)
        self.trees: dict[tuple[int, int], _RankTree] = {}
        self.root_alone = Tree.chain(0, device=device)
        effort = Effort(k, max(map(len, self.paths)))
        self.arm = FixedSize(effort)
        if method.nodes is None:
            sizes = pass_sizes(context, method.max_nodes)
            self.arm = Share(context, "token_recycling", [effort], sizes, TreeGains)

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        """Read the best paths of an effort's depth, as many as pay, from the table."""
        # Where a text has no use for more, the tree begins as the whole one does.
        depth = min(effort.depth, self.sequences.draft_depth)
        if not depth:
            return Draft(self.root_alone, root[:, None])
        whole, tokens = self._tree(depth, len(self.paths)), root[:, None]
        for parents, ranks in whole.levels:
            tokens = torch.cat([tokens, self.successors[tokens[:, parents], ranks].long()], 1)
        rows = self.arm.rows(effort, whole.tree.size, lambda: whole.nodes(tokens[:, 1:]))
        tree = self._tree(depth, rows - 1)
        return Draft(tree.tree, tokens.index_select(1, whole.places(tree)))

    def _tree(self, depth: int, count: int) -> _RankTree:
        if (depth, count) not in self.trees:
            paths = [path for path in self.paths if len(path) <= depth][:count]
            self.trees[depth, count] = _RankTree(paths, self.successors.device)
        return self.trees[depth, count]

    def observe(self, verified: Verified) -> None:
        super().observe(verified)
        ranked = verified.result.logits.topk(self.successors.shape[1]).indices
        remember(self.successors, verified.draft.tokens, ranked.to(torch.int32))


class _RankTree:
    """A tree of paths of ranks, and per level its nodes' parents and ranks."""

    def __init__(self, paths: Sequence[tuple[int, ...]], device: torch.device):
        shape = Tree.from_paths(paths).parent_lists[0]
        self.tree = shared_tree((tuple(shape),), device)
        self.ordered = sorted(paths, key=lambda path: (len(path), path))
        widths = [len(list(level)) for _, level in itertools.groupby(self.ordered, len)]
        ranks = uploaded([path[-1] for path in self.ordered], device, dtype=torch.int64)
        parents = self.tree.parents[1:]
        self.levels = list(zip(parents.split(widths), ranks.split(widths), strict=True))
        self.halvings = uploaded([_halvings(path) for path in self.ordered], device)

    def nodes(self, tokens: torch.Tensor) -> Nodes:
        """Return the nodes of trees whose drafted tokens [B, n] are these."""
        scores = (self.halvings * math.log(0.5)).expand(len(tokens), -1)
        levels, ranks = (
            np.array(x) for x in zip(*((len(p), p[-1]) for p in self.ordered), strict=True)
        )
        return Nodes(tokens, scores, self.tree.parents[1:] - 1, levels, ranks)

    def places(self, part: _RankTree) -> torch.Tensor:
        """Return where the nodes of a part of this tree stand in it, the root included."""
        numbers = {path: n for n, path in enumerate(self.ordered, start=1)}
        places = [0, *map(numbers.__getitem__, part.ordered)]
        return uploaded(places, self.halvings.device)


def _halvings(path: tuple[int, ...]) -> int:
    return sum(path) + len(path)


def best_rank_paths(nodes: int, depth: int, k: int) -> list[tuple[int, ...]]:
    """Return the `nodes` most likely paths of ranks, where rank r has probability 2 ** -(r + 1).

    With every path come all its beginnings; of equally likely paths the shorter comes first. Fewer
    than `nodes`, if there are not so many of at most `depth` ranks below `k`.
    """
    best: list[tuple[int, ...]] = []
    waiting: list[tuple[int, int, tuple[int, ...]]] = [(1, 1, (0,))]
    while waiting and len(best) < nodes:
        halvings, length, path = heapq.heappop(waiting)
        best.append(path)
        if length < depth:
            heapq.heappush(waiting, (halvings + 1, length + 1, (*path, 0)))
        if path[-1] + 1 < k:
            heapq.heappush(waiting, (halvings + 1, length, (*path[:-1], path[-1] + 1)))
    return best


def remember(successors: torch.Tensor, tokens: torch.Tensor, ranked: torch.Tensor) -> None:
    """Write each token's successors [B, T, k] into the table [V, k]; its last occurrence counts."""
    tokens, ranked = tokens.flatten(), ranked.flatten(0, 1)
    if len(tokens) == 1:
        successors[tokens] = ranked
        return
    order = torch.arange(len(tokens), device=tokens.device)
    # Writing a row twice in one call would leave to chance which one stays.
    last = order.new_full((len(successors),), -1).scatter_reduce(0, tokens, order, "amax")
    successors[tokens] = ranked[last[tokens]]
