"""Which candidates of a tree are expanded, and which kept, in C++ against lists."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import _cpu
from specattn.tree import Tree
from tests.cpu import calls

ints = {"dtype": torch.int64}
some = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def scores_with_ties(batch, count, seed):
    """Return scores of which some are equal and some impossible."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-6, 0, (batch, count), generator=generator).float()
    return scores.masked_fill(scores == -6, -torch.inf)


@some
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 8), st.integers(1, 48),
       st.integers(0, 99))  # fmt: skip
def test_the_best_candidates_of_a_level(batch, nodes, children, width, seed):
    count, first, words = nodes * children, 60, 2
    width = min(width, count)
    scores, tokens = scores_with_ties(batch, count, seed), torch.arange(batch * count) + 7
    tokens = tokens.view(batch, count)
    masks = torch.arange(1, 1 + batch * nodes * words).view(batch, nodes, words)
    found = [calls.poisoned(batch, width, **ints) for _ in range(2)]
    found += [calls.poisoned(batch, width), calls.poisoned(batch, width, **ints)]
    found.append(calls.poisoned(batch, width, words, **ints))
    _cpu.expand_best(tokens, scores, masks, first, *found, 1)
    chosen, best_tokens, best_scores, rows, best_masks = found
    for b in range(batch):
        order = sorted(range(count), key=lambda i: -scores[b, i].item())[:width]  # stable
        assert chosen[b].tolist() == order
        assert torch.equal(best_tokens[b], tokens[b, order])
        assert torch.equal(best_scores[b], scores[b, order])
        assert rows[b].tolist() == [b * nodes + i // children for i in order]
        for n, candidate in enumerate(order):
            bits = masks[b, candidate // children].clone()
            own = first + n
            bits[own // 64] |= 1 << own % 64 if own % 64 < 63 else -(2**63)
            assert torch.equal(best_masks[b, n], bits)


@some
@given(st.integers(1, 3), st.integers(1, 90), st.floats(0, 1), st.integers(0, 99))
def test_the_tree_of_the_most_probable_nodes(batch, nodes, share, seed):
    generator = torch.Generator().manual_seed(seed)
    own = scores_with_ties(batch, nodes, seed).clamp_min(-2) * 0.5
    parents = torch.stack(
        [torch.randint(-1, max(n, 0), (batch,), generator=generator) for n in range(nodes)], 1
    )
    scores = own.clone()
    for n in range(1, nodes):  # no node outdoes its parent
        above = scores.gather(1, parents[:, n : n + 1].clamp_min(0))[:, 0]
        scores[:, n] += torch.where(parents[:, n] < 0, 0.0, above)
    tokens, count = torch.arange(batch * nodes).view(batch, nodes), round(share * nodes)
    size = count + 1
    chosen, kept_tokens, kept = (calls.poisoned(batch, n, **ints) for n in (count, size, size))
    depths = calls.poisoned(batch, size, dtype=torch.int32)
    masks = calls.poisoned(batch, size, count // 64 + 1, **ints)
    _cpu.prune_tree(tokens, scores, parents, chosen, kept_tokens, kept, depths, masks, 1)
    for b in range(batch):
        best = sorted(range(nodes), key=lambda n: -scores[b, n].item())[:count]
        assert chosen[b].tolist() == sorted(best)
        assert torch.equal(kept_tokens[b, 1:], tokens[b, sorted(best)])
        number = {-1: 0} | {n: at for at, n in enumerate(sorted(best), 1)}
        expected = [-1, *(number[parents[b, n].item()] for n in sorted(best))]
        assert kept[b].tolist() == expected
        tree = Tree(expected)
        assert torch.equal(depths[b], tree.depths)
        assert torch.equal(masks[b], tree.packed_mask)


def test_wrong_arguments():
    tokens, scores = torch.zeros(1, 6, **ints), torch.zeros(1, 6)
    masks = torch.zeros(1, 3, 1, **ints)
    rest = [torch.zeros(1, 2, **ints) for _ in range(2)]
    rest += [torch.zeros(1, 2), torch.zeros(1, 2, **ints), torch.zeros(1, 2, 1, **ints)]
    _cpu.expand_best(tokens, scores, masks, 62, *rest, 1)
    with pytest.raises(IndexError, match="first: expected values from 0 to 62, got 63"):
        _cpu.expand_best(tokens, scores, masks, 63, *rest, 1)
    with pytest.raises(ValueError, match="tokens must be as many for every node"):
        _cpu.expand_best(tokens, scores, masks[:, :1].expand(1, 4, 1), 0, *rest, 1)
    kept = [torch.zeros(1, n, **ints) for n in (2, 3, 3)]
    kept += [torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3, 1, **ints)]
    parents = torch.tensor([[-1, 0, 1, 2, 4, 4]])
    with pytest.raises(IndexError, match="parents: expected values from -1 to 3, got 4"):
        _cpu.prune_tree(tokens, scores, parents, *kept, 1)
