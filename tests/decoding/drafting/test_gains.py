"""What drafts are expected to bring: probabilities corrected by what came true, sizes by both."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding.drafting.gains import (
    ChainGains,
    Effort,
    Lookups,
    Nodes,
    TreeGains,
    Truth,
    beams,
    chains,
    sizes_up_to,
)

SIZES = (1, 2, 3, 5, 9)
EFFORTS = [Effort(1, 1), Effort(1, 2), Effort(2, 2)]


def tree(chances, batch=1):
    """Return two levels of two nodes each below the best: [a, b, aa, ab] of each request."""
    a, b, aa, ab = chances
    scores = torch.tensor([[a, b, a * aa, a * ab]]).log().expand(batch, -1)
    tokens = torch.tensor([[5, 6, 7, 8]]).expand(batch, -1)
    return Nodes(
        tokens, scores, torch.tensor([-1, -1, 0, 0]), np.array([1, 1, 2, 2]), np.array([0, 1, 0, 1])
    )


BEST, BELOW = 1, 2
"""Kinds of tokens: their parent's best, and two levels and more below the root."""


def test_what_came_true_often_is_believed():
    """Best tokens of a chance of 0.6 that come true three times of ten: by kind, not by number."""
    truth, own = Truth(greedy=False), np.full(10, 0.6)
    kinds = np.full(10, BEST)
    for _ in range(20):
        truth.learn(kinds, own, np.arange(10) < 3)
    believed = truth.of(np.array([BEST, BEST, BEST + BELOW]), np.array([0.6, 0.9, 0.6]))
    # One of 0.9 is wrong so much more often as well; another kind is left alone.
    assert believed == pytest.approx([0.3, 1 - 0.1 * 0.7 / 0.4, 0.6], abs=0.02)
    for _ in range(8):
        truth.learn(kinds, own, np.ones(10, bool))
    assert truth.of(np.array([BEST]), np.array([0.6]))[0] > 0.7, "what is old weighs less"


def test_few_tokens_tell_that_a_drafter_doubts_too_much():
    """Twenty of a chance of 0.6, of which one was wrong: the next is taken for 0.9 and more."""
    truth = Truth(greedy=True)
    truth.learn(np.full(20, BEST), np.full(20, 0.6), np.arange(20) > 0)
    assert truth.of(np.array([BEST]), np.array([0.6]))[0] > 0.9


def test_others_than_the_best_are_learned_of_by_how_often_they_come_true():
    truth = Truth(greedy=False)
    truth.learn(np.full(100, BELOW), np.full(100, 0.1), np.arange(100) < 30)
    assert truth.of(np.array([BELOW]), np.array([0.2]))[0] == pytest.approx(0.6, abs=0.03)
    assert truth.of(np.array([BELOW]), np.array([0.5]))[0] == 1, "a chance at most"


def test_a_greedy_target_takes_the_best_more_often_than_its_chance():
    best, other = Truth(greedy=True).of(np.array([BEST, 0]), np.array([0.4, 0.4]))
    assert best == pytest.approx(1 - 0.6**2)
    assert other == pytest.approx(0.2)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_tree_tells_what_each_smaller_one_brings(batch):
    gains = TreeGains(EFFORTS, SIZES, greedy=False)
    gains.truth.of = lambda kinds, own: own
    for _ in range(200):
        found = gains.note(2, tree((0.6, 0.4, 0.8, 0.1), batch))
    # In the order of their own chances: 0.6, 0.48, 0.4, 0.06.
    whole = np.cumsum([0, 0.6, 0.6 * 0.8, 0.4, 0.6 * 0.1])
    assert found.shape == (batch, len(SIZES))
    assert found[0] == pytest.approx(whole[np.minimum(np.array(SIZES) - 1, 4)])
    assert gains.table[2] == pytest.approx(found[0], abs=1e-3)
    assert gains.table[0] == pytest.approx([0, 0.6, 0.6, 0.6, 0.6], abs=1e-3)
    assert gains.table[1] == pytest.approx([0, 0.6, 1.08, 1.08, 1.08], abs=1e-3)


def test_larger_efforts_move_with_what_was_drafted():
    """What small drafts bring says something of large ones: they are not frozen."""
    moved = {}
    for chance in (0.95, 0.05):
        gains = TreeGains(EFFORTS, SIZES, greedy=False)
        before = gains.table[2, -1]
        for _ in range(30):
            scores = torch.tensor([[chance]]).log()
            gains.note(
                0,
                Nodes(
                    torch.tensor([[5]]), scores, torch.tensor([-1]), np.array([1]), np.array([0])
                ),
            )
        moved[chance] = gains.table[2, -1] - before
        assert np.isfinite(gains.table).all()
        assert (np.diff(gains.table, axis=1) >= -1e-9).all()
    assert moved[0.95] > 0.1
    assert moved[0.05] < -0.5


def test_only_nodes_whose_parents_came_true_are_learned_of():
    gains = TreeGains(EFFORTS, SIZES, greedy=False)
    before = gains.truth.expected.sum()
    gains.note(2, tree((0.6, 0.35, 0.8, 0.1)))
    gains.learn([[5, 9]])  # the best child came, then neither of its children
    below = 0.2 + 0.1  # that the best is wrong, that the other is right
    assert gains.truth.expected.sum() - before == pytest.approx(0.4 + 0.35 + below)
    gains.note(2, tree((0.6, 0.35, 0.8, 0.1)))
    gains.learn([[6]])
    assert gains.truth.expected.sum() - before == pytest.approx(2 * (0.4 + 0.35) + below)
    gains.note(2, tree((0.6, 0.35, 0.8, 0.1)))
    gains.learn([None])
    gains.learn([[5, 7]])  # nothing was noted
    assert gains.truth.expected.sum() - before == pytest.approx(2 * (0.4 + 0.35) + below)


def test_nodes_that_fill_up_count_nothing():
    nodes = tree((0.6, 0.4, 0.8, 0.1))
    scores = nodes.scores.clone()
    scores[:, 2:] = -torch.inf
    gains = TreeGains(EFFORTS, SIZES, greedy=False)
    found = gains.note(2, nodes._replace(scores=scores))
    assert found[0, -1] == found[0, 2] < 1.2
    before = gains.truth.expected.sum()
    gains.learn([[5, 7]])
    assert gains.truth.expected.sum() - before == pytest.approx(0.4 + 0.4)


@given(st.data())
def test_expectations_of_random_trees_are_those_of_a_plain_statement(data):
    """Ragged levels, ties and several requests: sums along sorted nodes, by loops."""
    batch, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    parents = [[data.draw(st.integers(-1, i - 1)) for i in range(n)] for _ in range(batch)]
    own = [
        [data.draw(st.sampled_from([0.03, 0.2, 0.2, 0.55, 0.85])) for _ in range(n)]
        for _ in range(batch)
    ]
    levels, paths = np.ones((batch, n), int), np.ones((batch, n))
    for row in range(batch):
        for i, parent in enumerate(parents[row]):
            levels[row, i] = 1 if parent < 0 else levels[row, parent] + 1
            paths[row, i] = own[row][i] * (1 if parent < 0 else paths[row, parent])
    effort = Effort(9, n)
    gains = TreeGains([effort], SIZES, greedy=False)
    gains.truth.of = lambda kinds, own: own
    nodes = Nodes(
        torch.zeros(batch, n, dtype=torch.int64), torch.from_numpy(paths).log(),
        torch.tensor(parents), levels, np.zeros((batch, n), int),
    )  # fmt: skip
    found = gains.note(0, nodes)
    for row in range(batch):
        worth = []
        for i, parent in enumerate(parents[row]):
            worth.append(own[row][i] * (1 if parent < 0 else worth[parent]))
        order = sorted(range(n), key=lambda i: -paths[row, i])
        sums = [0.0, *np.cumsum([worth[i] for i in order])]
        exact = [sums[min(size - 1, n)] for size in SIZES]
        # Of equal products others may come first: their sum is the same with all of them.
        assert found[row][[0, -1]] == pytest.approx([exact[0], exact[-1]])
        assert (np.diff(found[row]) >= -1e-12).all()


def test_chains_are_judged_by_depth():
    gains = ChainGains(chains(4), [1, 2, 3, 4, 5])
    for _ in range(40):
        gains.learn(4, [2, None])
    assert gains.probabilities[:2] == pytest.approx([1, 1], abs=0.05)
    assert gains.probabilities[2] < 0.1
    assert gains.table[-1, -1] == pytest.approx(2.0, abs=0.2)
    assert gains.table[0].tolist() == pytest.approx(
        [-1, gains.table[0, 1], *[gains.table[0, 1]] * 3]
    )


def test_lookups_are_corrected_by_what_came():
    lookups = Lookups(0.75, 4.0, 32.0)
    assert lookups.factor == 0.75
    for _ in range(60):
        lookups.learn(2.0, 1)
    assert lookups.factor == pytest.approx(0.5, abs=0.02)
    assert lookups.expected <= 34


def test_one_wrong_token_does_not_end_trust_in_lookups():
    lookups = Lookups(at_once=4.0)
    lookups.learn(32.0, 0)
    assert lookups.factor == 0.5
    lookups.learn(32.0, 32)
    assert lookups.factor == pytest.approx(2 / 3)


def test_few_efforts_and_sizes_are_chosen_from():
    assert [*map(tuple, beams(10, 6))] == [(1, 1), (1, 3), (1, 6), (4, 3), (4, 6), (10, 3), (10, 6)]
    assert beams(1, 1) == [Effort(1, 1)]
    assert beams(3, 2) == [Effort(1, 1), Effort(1, 2), Effort(3, 2)]
    assert chains(6) == [Effort(1, n) for n in (1, 2, 3, 4, 6)]
    assert sizes_up_to(8) == [1, 2, 3, 4, 5, 7, 8]
