"""`accept` leaves the target's distribution alone: exactly, by enumeration on tiny vocabularies.

`sample`, the only place where randomness enters, is replaced by a script of outcomes. One batch
then holds every draft times every combination of outcomes, each with its exact probability. The
draws themselves are tested in `test_acceptance_statistics.py`.
"""

from functools import partial

import pytest
import torch

from specattn import acceptance
from specattn.acceptance import accept, walk
from specattn.tree import Tree
from tests import distributions
from tests.walks import report_of, walked

TREES = {
    "root": [-1],
    "chain1": [-1, 0],
    "chain3": [-1, 0, 1, 2],
    "two": [-1, 0, 0],
    "three": [-1, 0, 0, 0],
    "full2x2": [-1, 0, 0, 1, 1, 2, 2],
    "crooked": [-1, 0, 1, 0, 3, 1],
    "unlike": [-1, 0, 0, 1, 3, 3],
}


def _sharpened(tables, power):
    return [(t**power) / (t**power).sum(-1, keepdim=True) for t in tables]


def _without(tables, token):
    kept = [t.clone().index_fill_(-1, torch.tensor([token]), 0.0) for t in tables]
    return [t / t.sum(-1, keepdim=True) for t in kept]


def _pairs(vocab, depth):
    """Name pairs of target and draft distributions that are awkward in different ways."""
    p = distributions.random_tables(vocab, depth, seed=1)
    q = distributions.random_tables(vocab, depth, seed=2)
    return {
        "unlike": (p, q),
        "equal": (p, p),
        "sharp-draft": (p, _sharpened(q, 6)),
        "sharp-target": (_sharpened(p, 6), q),
        "greedy-target": (distributions.one_hot(p), q),
        "one-hot-draft": (p, distributions.one_hot(q)),
        "both-one-hot": (distributions.one_hot(p), distributions.one_hot(q)),
        "target-hole": (_without(p, 0), q),
        "draft-hole": (p, _without(q, 0)),
        "disjoint": (_without(p, 0), [torch.eye(vocab)[:1].double().expand_as(t) for t in q]),
    }


PAIRS = list(_pairs(2, 0))


@pytest.fixture
def induced_laws(monkeypatch):
    """Return a function: the exact distribution of what is emitted for each of some drafts."""

    def run(parents, tokens, p_tables, q_tables=None):
        tree = Tree(parents)

        def emit(outcomes, drafts):
            script = distributions.Script(outcomes)
            monkeypatch.setattr(acceptance, "sample", script)
            draft_probs = (
                None if q_tables is None else distributions.at_nodes(q_tables, parents, drafts)
            )
            result = accept(
                tree,
                drafts,
                distributions.at_nodes(p_tables, parents, drafts),
                draft_probs=draft_probs,
            )
            return script, *distributions.emitted(drafts, result)

        arities = emit(torch.zeros(1, 1, dtype=torch.int64), tokens[:1])[0].arities
        outcomes = distributions.all_outcomes(arities)
        repeated = tokens.repeat_interleave(len(outcomes), dim=0)
        script, sequences, lengths = emit(outcomes.repeat(len(tokens), 1), repeated)
        return [
            distributions.completed_law(p_tables, *part)
            for part in zip(
                sequences.split(len(outcomes)),
                lengths.split(len(outcomes)),
                script.probability.split(len(outcomes)),
                strict=True,
            )
        ]

    return run


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("vocab", [2, 3])
def test_any_fixed_draft_leaves_the_law_alone(induced_laws, shape, vocab):
    parents = TREES[shape]
    tables = distributions.random_tables(vocab, max(distributions.depths(parents)), seed=3)
    drafts = torch.cartesian_prod(*[torch.arange(vocab)] * len(parents)).reshape(-1, len(parents))
    drafts = drafts[drafts[:, 0] == 0]  # the root's token is not read
    for distribution in induced_laws(parents, drafts, tables):
        torch.testing.assert_close(distribution, distributions.joint(tables), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [name for name in TREES if name != "root"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("replacement", [False, True], ids=["distinct", "independent"])
def test_sampled_drafts_leave_the_law_alone(induced_laws, shape, pair, replacement):
    parents = TREES[shape]
    p, q = _pairs(3, max(distributions.depths(parents)))[pair]
    drafts, weights = distributions.all_drafts(parents, q, replacement=replacement)
    distribution = torch.stack(induced_laws(parents, drafts, p, q))
    torch.testing.assert_close(weights @ distribution, distributions.joint(p), rtol=0, atol=1e-12)


@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_given_the_draft_the_first_token_follows_the_textbook(induced_laws, pair, children):
    """A rule that never accepts is exact too: this pins how often each child is accepted."""
    parents = [-1] + [0] * children
    p, q = _pairs(3, 1)[pair]
    drafts, _ = distributions.all_drafts(parents, q)
    for draft, distribution in zip(
        drafts.tolist(), induced_laws(parents, drafts, p, q), strict=True
    ):
        first = distribution.reshape(3, 3).sum(-1).tolist()
        assert first == pytest.approx(_textbook(p[0][0], q[0][0], draft[1:]), abs=1e-12)


def _textbook(p, q, children):
    """Return the distribution of the first token given the drafted siblings, in plain Python."""
    p, q, reached = p.tolist(), q.tolist(), 1.0
    distribution = [0.0] * len(p)
    for x in children:
        if q[x] == 0:
            continue
        accept_x = min(1.0, p[x] / q[x])
        distribution[x] += reached * accept_x
        reached *= 1 - accept_x
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        if sum(residual) < 1e-15:  # p == q: x was accepted for certain
            break
        p = [r / sum(residual) for r in residual]
        q = [0.0 if y == x else b for y, b in enumerate(q)]
        q = [b / (sum(q) or 1.0) for b in q]
    return [mass + reached * a for mass, a in zip(distribution, p, strict=True)]


def test_acceptance_probability_of_one_sampled_child_is_the_overlap(induced_laws):
    p, q = _pairs(4, 1)["unlike"]
    drafts, weights = distributions.all_drafts([-1, 0], q)
    overlap = 0.0
    for draft, weight, distribution in zip(
        drafts, weights, induced_laws([-1, 0], drafts, p, q), strict=True
    ):
        x = draft[1]
        # A rejected x has no residual mass, so it is emitted first only when it was accepted.
        overlap += weight * distribution.reshape(4, 4).sum(-1)[x]
    torch.testing.assert_close(overlap, torch.minimum(p[0][0], q[0][0]).sum())


def test_a_child_that_its_law_cannot_have_produced_is_passed_over(induced_laws):
    """Accepting it (p / q is infinite) would emit it more often than the target does."""
    p, q = _pairs(3, 1)["draft-hole"]
    (distribution,) = induced_laws([-1, 0], torch.tensor([[0, 0]]), p, q)
    torch.testing.assert_close(distribution, distributions.joint(p), rtol=0, atol=1e-12)


def test_a_walk_asks_once_per_level_with_the_path_so_far():
    """Request 0 goes down to node 4, request 1 leaves at once, request 2 after one step."""
    tree = Tree([-1, 0, 0, 2, 3])
    tokens = torch.tensor([[9, 1, 2, 3, 4], [9, 1, 2, 3, 4], [9, 1, 2, 3, 4]])
    answers = torch.tensor([[2, 3, 4, 5], [7, 8, 8, 8], [2, 6, 8, 8]])
    asked = []

    def sample_at(node, emitted):
        asked.append((node.tolist(), emitted.tolist()))
        return answers[:, emitted.shape[1]]

    accepted = walk(tree, tokens, sample_at)
    assert [node for node, _ in asked] == [[0, 0, 0], [2, 0, 2], [3, 0, 2], [4, 0, 2]]
    assert [emitted[0] for _, emitted in asked] == [[], [2], [2, 3], [2, 3, 4]]
    assert accepted.nodes.tolist() == [[2, 3, 4], [-1, -1, -1], [2, -1, -1]]
    assert accepted.next_token.tolist() == [5, 7, 6]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_walk_takes_the_way_of_plain_python(seed, batched):
    """Random trees with repeated tokens and padding, and a target that knows the whole path."""
    random = torch.Generator().manual_seed(seed)
    size, batch, vocabulary = 12, 4, 3

    def parents():
        own = [-1] + [int(torch.randint(n, (), generator=random)) for n in range(1, size)]
        return own[: size - seed % 4] + [-1] * (seed % 4)

    tree = Tree([parents() for _ in range(batch)] if batched else parents())
    tokens = torch.randint(vocabulary, (batch, size), generator=random)

    def answer(request, node, path):
        return (seed + 5 * request + 3 * node + sum(path) * len(path)) % vocabulary

    def sample_at(node, emitted):
        paths = [[token for token in path if token >= 0] for path in emitted.tolist()]
        rows = zip(range(batch), node.tolist(), paths, strict=True)
        return torch.tensor([answer(*row) for row in rows])

    found = walk(tree, tokens, sample_at)
    walks = [
        walked(tree.parent_lists[request if batched else 0], drafted, partial(answer, request))
        for request, drafted in enumerate(tokens.tolist())
    ]
    report = torch.cat([torch.stack([found.counts, found.next_token], 1), found.nodes], 1)
    assert torch.equal(report, report_of(walks, tree.max_depth))
    for request, (nodes, emitted) in enumerate(walks):
        assert emitted[:-1] == tokens[request, nodes].tolist()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("target_probs", torch.nan, "a finite number everywhere"),
        ("target_probs", torch.inf, "a finite number everywhere"),
        ("target_probs", -0.1, "nothing negative"),
        ("target_probs", 0.0, "some mass"),
        ("draft_probs", torch.nan, "a finite number everywhere"),
        ("draft_probs", -0.1, "nothing negative"),
    ],
)
def test_rows_that_are_no_distribution_are_named_on_demand(monkeypatch, name, value, expected):
    tree = Tree([[-1, 0, 1, -1], [-1, 0, 0, 1]])
    tables = {"target_probs": torch.rand(2, 4, 5), "draft_probs": torch.rand(2, 4, 5)}
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    unread = {"target_probs": [(0, 3)], "draft_probs": [(0, 2), (0, 3), (1, 2), (1, 3)]}
    for row in unread[name]:
        tables[name][row] = value
    monkeypatch.setenv("SPECATTN_CHECK", "1")
    accept(tree, tokens, **tables)
    tables[name][1, 1] = value
    with pytest.raises(ValueError, match=rf"{name}\[1, 1\]: expected {expected}, got a row from"):
        accept(tree, tokens, **tables)
    monkeypatch.delenv("SPECATTN_CHECK")
    accept(tree, tokens, **tables)
