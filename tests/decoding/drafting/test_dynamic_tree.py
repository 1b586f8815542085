"""Trees that grow where a drafter is confident: EAGLE-2's, grown by PosS' block."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.blocks import Ops, top_tokens
from specattn.decoding.methods.poss import SpecialistBlock
from tests.decoding.methods.test_poss import Under, started
from tests.decoding.models import tiny_model
from tests.drafters.poss_statement import random_drafter

pytestmark = pytest.mark.usefixtures("poisoned_empty")


def eagle_2(say, root, width, depth, size):
    """Return EAGLE-2's tree as a set of token paths: every node by itself, all of them sorted.

    `say(path)` is the drafter's distribution after a path. Section 4.1: per level the best `width`
    nodes of the level before are expanded, by the product of probabilities along their paths;
    section 4.2: the best `size - 1` of all nodes are kept.
    """
    expand, nodes = {(): 1.0}, {}
    for _ in range(depth):
        level = {}
        for path, value in expand.items():
            distribution = say((root, *path))
            best = sorted(range(len(distribution)), key=lambda t: -distribution[t])[:width]
            level |= {(*path, token): value * distribution[token] for token in best}
        nodes |= level
        expand = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    return set(sorted(nodes, key=lambda path: (-nodes[path], len(path)))[: size - 1])


class Saying(Ops):
    """Torch's operators, but the head says ``say(request, path)`` of every node."""

    def __init__(self, say, roots):
        self.say, self.paths = say, [[(root,)] for root in roots.tolist()]

    def head(self, x, module):
        return torch.stack([
            torch.stack([self.say(request, path) for path in level])
            for request, level in enumerate(self.paths)
        ])  # fmt: skip

    def expand_best(self, *arguments):
        found = super().expand_best(*arguments)
        nodes = zip(found[1].tolist(), found[3].tolist(), strict=True)
        self.paths = [
            [(*level[row % len(level)], token) for token, row in zip(tokens, rows, strict=True)]
            for level, (tokens, rows) in zip(self.paths, nodes, strict=True)
        ]
        return found


def grown(say, roots, width, depth, vocabulary):
    """Return what a drafter scores behind `roots` that says ``say(request, path)``."""
    model = tiny_model("llama", vocab_size=vocabulary)
    drafter = random_drafter(model, layers=1, dtype=torch.float32)
    context = started(model, roots[:, None].expand(-1, 2), nodes=1 + width * depth)
    block = SpecialistBlock(drafter, context, 1 + width * depth, depth)
    block.growing = Under(Saying(say, roots))
    with torch.no_grad():
        return block.grow(roots, width, depth)


def token_paths(draft, request):
    tree = draft.tree.paths.expand(len(draft.tokens), -1, -1)[request]
    tokens = draft.tokens[request]
    return [tuple(tokens[n].item() for n in path[1:] if n >= 0) for path in tree]


@pytest.mark.parametrize(
    ("width", "depth", "size", "vocabulary"),
    [(10, 6, 60, 40), (3, 5, 12, 9), (1, 4, 60, 9), (4, 1, 3, 9), (10, 3, 60, 4), (10, 6, 2, 40),
     (10, 3, 60, 640)],
)  # fmt: skip
def test_the_tree_is_eagle_2s(monkeypatch, width, depth, size, vocabulary):
    monkeypatch.setattr("specattn.blocks.ops._LARGE", 512)
    roots = torch.tensor([1, 0, 2])

    def say(request, path):
        generator = torch.Generator().manual_seed(hash((request, *path)) % 2**31)
        logits = 2 * torch.randn(vocabulary, generator=generator)
        return logits.log_softmax(-1) + torch.randn(1)  # logits may be off by a constant

    draft = grown(say, roots, width, depth, vocabulary).best(size)
    assert torch.equal(draft.tokens[:, 0], roots)
    for request, root in enumerate(roots.tolist()):
        expected = eagle_2(
            lambda path, r=request: say(r, path).softmax(-1).tolist(), root, width, depth, size
        )
        found = token_paths(draft, request)[1:]
        assert len(found) == len(set(found)), "no node twice"
        assert set(found) == expected


@given(
    st.integers(1, 12),
    st.sampled_from([1, 7, 96, 320, 512, 4096]),
    st.booleans(),
    st.integers(0, 99),
)
@pytest.mark.parametrize("large", [1, 2**14])
def test_the_best_tokens_are_those_of_topk(large, count, size, with_ties, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, size, generator=generator)
    x = x.round() if with_ties else x
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specattn.blocks.ops._LARGE", large)
        found, at = top_tokens(x, count)
    assert torch.equal(found, x.topk(min(count, size)).values)
    assert torch.equal(x.gather(-1, at), found)
    assert all(len(set(row)) == len(row) for row in at.flatten(0, 1).tolist())


def test_equal_scores_still_make_a_tree():
    """A sure drafter gives probability 1: a child then scores as its parent does."""
    logits = torch.tensor([0.0, 1e4, -1e4, 0.0])
    tree = grown(lambda request, path: logits, torch.tensor([0]), 2, 4, 4)
    for size in range(2, 9):
        draft = tree.best(size)
        assert draft.tree.size == size
        assert (draft.tree.parents[0, 1:] < torch.arange(1, size)).all()
        assert token_paths(draft, 0)[min(size - 1, 4)][0] == 1


def test_places_say_which_beam_would_have_found_a_candidate():
    """A narrower beam grows a part of the same tree: the candidates of smaller ranks."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(9, 9, generator=generator)  # what follows a token
    trees = {
        width: grown(lambda request, path: table[path[-1]], torch.tensor([4]), width, 3, 9)
        for width in (1, 2, 4)
    }
    levels, ranks = trees[4].places
    for width, tree in trees.items():
        assert tree.places.shape[1] == int((ranks < width).sum())
        assert sorted(tree.places[0]) == sorted(levels[ranks < width])
    first = trees[4].scores[0, :4]
    assert torch.equal(first[torch.tensor(ranks[:4]) < 2], trees[2].scores[0, :2])
