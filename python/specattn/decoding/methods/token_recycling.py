"""Token recycling: draft a tree from the tokens that the target last ranked best after each token.

Every verification ranks what could follow each of its nodes, accepted or not. A table keeps the
best few per token of the vocabulary, and the next tree is read from it. (Luo et al., *Turning Trash
into Treasure*, arXiv 2408.08696.)
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import torch

from specattn.decoding.drafting import Draft, DraftContext, Drafter, Verified
from specattn.decoding.method import Method
from specattn.tree import Tree


@dataclass(frozen=True)
class TokenRecycling(Method, name="token_recycling"):
    """Drafting from a table of successors, [V, k], that every verification refreshes.

    All requests of a run read and write one table, which starts empty. The tree is the same in
    every round: of all paths of ranks the `nodes` best, when each rank is taken to be half as
    likely as the one before it.

    Parameters
    ----------
    nodes : int
        Drafted tokens per round.
    depth : int
        Longest path.
    k : int
        Successors that are kept of each token.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    nodes: int = 80
    depth: int = 6
    k: int = 8

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def max_nodes(self) -> int:
        """The root and `nodes` drafted tokens."""
        return self.nodes + 1

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter whose table is empty."""
        return _RecyclingDrafter(self, context)


class _RecyclingDrafter(Drafter):
    def __init__(self, method: TokenRecycling, context: DraftContext):
        target, self.sequences = context.target, context.sequences
        vocabulary, device = target.model.config.vocab_size, target.device
        k = min(method.k, vocabulary)
        # Token 0 follows what was never seen: a guess as good as any.
        self.successors = torch.zeros(vocabulary, k, dtype=torch.int32, device=device)
        paths = best_rank_paths(method.nodes, method.depth, k)
        # The tree of any depth: it begins as the whole one does, where a text has no use for more.
        self.trees = [
            Tree.from_paths([path for path in paths if len(path) <= depth], device=device)
            for depth in range(max(map(len, paths)) + 1)
        ]
        ranks = [path[-1] for path in sorted(paths, key=lambda path: (len(path), path))]
        widths = [level.size - above.size for above, level in itertools.pairwise(self.trees)]
        parents = self.trees[-1].parents[1:].split(widths)
        own = torch.tensor(ranks, device=device).split(widths)
        self.levels = list(zip(parents, own, strict=True))

    def propose(self, root: torch.Tensor) -> Draft:
        tokens, depth = root[:, None], min(len(self.levels), self.sequences.draft_depth)
        for parents, ranks in self.levels[:depth]:
            tokens = torch.cat([tokens, self.successors[tokens[:, parents], ranks].long()], 1)
        return Draft(self.trees[depth], tokens)

    def observe(self, verified: Verified) -> None:
        ranked = verified.result.logits.topk(self.successors.shape[1]).indices
        remember(self.successors, verified.draft.tokens, ranked.to(torch.int32))


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
    """Write each token's successors into the table; a token's last occurrence counts.

    Parameters
    ----------
    successors : Tensor, int32 [V, k]
        Changed in place.
    tokens : Tensor, int64 [B, T]
    ranked : Tensor, int32 [B, T, k]
    """
    tokens, ranked = tokens.flatten(), ranked.flatten(0, 1)
    order = torch.arange(len(tokens), device=tokens.device)
    # Writing a row twice in one call would leave to chance which one stays.
    last = order.new_full((len(successors),), -1).scatter_reduce(0, tokens, order, "amax")
    successors[tokens] = ranked[last[tokens]]
