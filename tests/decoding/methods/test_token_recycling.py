"""Token recycling: its tree, its table, and that it learns within a run."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding import TokenRecycling, generate
from specattn.decoding.methods.token_recycling import best_rank_paths, remember
from tests.decoding.models import greedy_by_transformers, tiny_model


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
def test_the_tree_has_the_most_likely_paths(nodes, depth, k):
    every = [p for n in range(1, depth + 1) for p in itertools.product(range(k), repeat=n)]
    every.sort(key=lambda path: (sum(path) + len(path), len(path), path))
    assert best_rank_paths(nodes, depth, k) == every[:nodes]


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=3))
def test_a_token_remembers_what_it_was_told_last(tokens):
    tokens = torch.tensor(tokens)
    ranked = torch.arange(tokens.numel() * 2, dtype=torch.int32).view(*tokens.shape, 2)
    table = torch.full((6, 2), -1, dtype=torch.int32)
    expected = table.clone()
    for token, row in zip(tokens.flatten(), ranked.flatten(0, 1), strict=True):
        expected[token] = row
    remember(table, tokens, ranked)
    assert torch.equal(table, expected)


def test_every_node_is_a_successor_of_its_parent_and_learns_its_own():
    """Draft and table, round by round, against the definition of both."""
    model, table = tiny_model("qwen3"), {}
    method = TokenRecycling(nodes=11, depth=3, k=3)
    drafts = []
    start = TokenRecycling.start

    def recording(self, *arguments):
        drafter = start(self, *arguments)
        observe = drafter.observe

        def keep(verified):  # its logits hold until the next pass
            drafts.append((verified.draft, verified.result.logits.clone()))
            observe(verified)

        drafter.observe = keep
        return drafter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenRecycling, "start", recording)
        generate(model, torch.tensor([3, 9, 4]), method, max_new_tokens=12)
    paths = sorted(best_rank_paths(11, 3, 3), key=lambda path: (len(path), path))
    for draft, (logits,) in drafts:
        (tokens,) = draft.tokens.tolist()
        for node, parent in enumerate(draft.tree.parents.tolist()):
            if node:
                successors = table.get(tokens[parent], [0, 0, 0])
                assert tokens[node] == successors[paths[node - 1][-1]]
        for token, row in zip(tokens, logits, strict=True):
            table[token] = row.topk(3).indices.tolist()


def test_what_it_has_seen_makes_drafts_right():
    model = tiny_model("qwen3")
    block = torch.randint(0, 96, (12,), generator=torch.Generator().manual_seed(3))
    text = block.repeat(8)
    output = generate(model, text, TokenRecycling(nodes=20, depth=4), max_new_tokens=60)
    assert output.new_tokens == [greedy_by_transformers(model, text, 60)]
    assert output.statistics.total.mean_acceptance_length > 1.3


@pytest.mark.parametrize("name", ["nodes", "depth", "k"])
def test_parameters_out_of_range(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        TokenRecycling(**{name: 0})
