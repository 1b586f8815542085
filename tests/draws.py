"""Rounds at random: trees, drafts that are often met, logits; what a walk down them is to find."""

import math
import random
from dataclasses import dataclass
from functools import partial

import torch

import specattn
from specattn.decoding.text.draws import Draws
from specattn.tree import Tree
from tests.walks import walked


@dataclass
class Round:
    """A verified draft of every request, and how tokens are drawn behind it."""

    tree: Tree
    tokens: torch.Tensor
    logits: torch.Tensor
    draws: Draws

    def to(self, device):
        """Return the round on a device."""
        places, seed, temperatures = self.draws
        moved = None if temperatures is None else temperatures.to(device)
        draws = Draws(places.to(device), seed, moved)
        tokens, logits = self.tokens.to(device), self.logits.to(device)
        return Round(self.tree.to(device), tokens, logits, draws)

    @property
    def arguments(self):
        """What `draw_and_walk` takes."""
        return self.tree, self.tokens, self.logits, self.draws

    def expected(self, *, one_by_one=False):
        """Return nodes and report as plain Python walks, by draws of one node each if asked to."""
        parents, depth = self.tree.parent_lists, self.tree.max_depth
        drawn = self.draws(self.logits, self.tree.depths).tolist()
        shapes = self.tree.drafted_and_depth
        nodes, report = [], []
        for b, tokens in enumerate(self.tokens.tolist()):
            own = b % len(parents)
            after = partial(self._after, b) if one_by_one else partial(_known, drawn[b])
            path, said = walked(parents[own], tokens, after)
            rest, (drafted, deepest) = [-1] * (depth - len(path)), shapes[own]
            nodes.append([*path, *rest])
            report.append([said[-1], drafted, len(path), deepest, *said[:-1], *rest])
        shape = len(self.tokens), -1
        return torch.tensor(nodes).view(len(nodes), depth), torch.tensor(report).view(shape)

    def _after(self, b, node, path):
        scores = self.logits[b, node].float()
        if self.draws.temperatures is not None:
            scores = scores / self.draws.temperatures[b]
        if self.draws.seed is not None:
            rows, lengths = self.draws.places[:, b : b + 1]
            noisy = specattn.add_gumbel_noise(
                scores[None], self.draws.seed, rows, lengths + len(path)
            )
            scores = noisy[0]
        best, token = scores.max(-1)
        return int(token) if best > -math.inf else -1


def drawn_round(seed, most=9, vocabulary=None):
    """Return a round of a seed, with trees of at most `most` nodes."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, size = choose.choice((1, 2, 3)), choose.choice((1, 2, most, choose.randint(1, most)))
    vocabulary = vocabulary or choose.choice((1, 7, 255, 1024, 1025, 4097))
    trees = [_tree(choose, size) for _ in range(batch)]
    tree = trees[0] if choose.random() < 0.4 else Tree.stack(trees)
    if choose.random() < 0.2:
        tree = Tree.chain(size - 1)
    dtype = choose.choice((torch.float32, torch.bfloat16, torch.float16))
    # A model's logits may be a part of more rows, and come with a room behind a row.
    rows, room = tree.size + choose.choice((0, 3)), choose.choice((0, 8))
    logits = torch.randn(batch, rows, vocabulary + room, generator=generator).to(dtype)
    logits = logits[:, : tree.size, :vocabulary]
    odd = torch.rand(batch, tree.size, generator=generator)
    logits[odd < 0.08] = -torch.inf
    logits[odd > 0.92, vocabulary // 2] = torch.nan
    if choose.random() < 0.3:  # ties
        logits.round_()
    temperatures = None
    if choose.random() < 0.6:
        several = [choose.choice((1.0, 0.3, 0.7, 1.3)) for _ in range(batch)]
        temperatures = torch.tensor(several, dtype=torch.float32)
    places = [[choose.randint(0, 2**20) for _ in range(batch)] for _ in range(2)]
    noise = choose.choice((None, 3, 2**40 + 7, 2**64 - 5))
    draws = Draws(torch.tensor(places), noise, temperatures)
    return Round(tree, drafts(choose, tree, logits, draws), logits, draws)


def _known(drawn, node, path):
    return drawn[node]


def _tree(choose, size):
    """Return a tree of up to so many nodes: bushy, or nearly a chain."""
    size, back = choose.randint(1, size), choose.choice((1, 2, size))
    return Tree([-1, *(choose.randint(max(0, n - back), n - 1) for n in range(1, size))])


def drafts(choose, tree, logits, draws):
    """Return tokens [B, T] of which most are what is drawn behind their parents."""
    drawn = draws(logits, tree.depths).tolist()
    parents = tree.parents.expand(len(logits), -1).tolist()
    tokens = [[choose.randrange(logits.shape[2]) for _ in own] for own in parents]
    for b, own in enumerate(parents):
        for node, parent in enumerate(own):
            if node and choose.random() < 0.75:
                tokens[b][node] = max(0, drawn[b][max(0, parent)])
    return torch.tensor(tokens)
