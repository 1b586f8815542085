"""What `accept` never does, whatever it is given: properties, edges and wrong arguments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn import acceptance
from specattn.acceptance import accept, accept_samples
from specattn.tree import Tree
from tests import distributions


@st.composite
def problems(draw):
    """Draw trees with padding, repeated tokens, probabilities with zeros and one-hot rows."""
    batch, size, vocab = (draw(st.integers(1, top)) for top in (4, 10, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    rows = [_random_tree(draw, size) for _ in range(draw(st.sampled_from([1, batch])))]
    parents = rows[0] if len(rows) == 1 else rows
    tokens = torch.randint(vocab, (batch, size), generator=generator)
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))

    def random_laws():
        logits = torch.randn(batch, size, vocab, generator=generator) * draw(
            st.sampled_from([1, 9])
        )
        holes = torch.rand(logits.shape, generator=generator) < draw(st.sampled_from([0, 0.5, 1]))
        holes.scatter_(-1, logits.argmax(-1, keepdim=True), False)
        return logits.masked_fill(holes, float("-inf")).softmax(-1).to(dtype)

    draft = random_laws() if draw(st.booleans()) else None
    return parents, tokens, random_laws(), draft, generator


def _random_tree(draw, size):
    parents = [-1]
    for node in range(1, size):
        real = [0] + [n for n in range(1, node) if parents[n] >= 0]
        parents.append(draw(st.sampled_from([-1, *real])))
    return parents


@given(problems())
def test_the_accepted_nodes_are_a_path_and_the_next_token_has_target_mass(problem):
    parents, tokens, target, draft, generator = problem
    tree = Tree(parents)
    nodes, counts, next_token = accept(tree, tokens, target, draft_probs=draft, generator=generator)
    assert nodes.shape == (len(tokens), tree.max_depth)
    for b, path in enumerate(nodes.tolist()):
        own = tree.parents.expand(len(tokens), -1)[b].tolist()
        count, last = int(counts[b]), 0
        assert all(node == -1 for node in path[count:])
        for node in path[:count]:
            assert own[node] == last
            assert target[b, last, tokens[b, node]] > 0
            assert draft is None or draft[b, last, tokens[b, node]] > 0
            last = node
        assert target[b, last, next_token[b]] > 0
        if draft is None:  # the walk ends only where no child carries the target's sample
            followers = [n for n in range(1, tree.size) if own[n] == last]
            assert next_token[b] not in [tokens[b, n] for n in followers]


@given(problems())
def test_the_same_generator_gives_the_same_tokens_and_no_other_is_used(problem):
    parents, tokens, target, draft, _ = problem
    before = torch.get_rng_state()
    results = [
        accept(
            Tree(parents),
            tokens,
            target,
            draft_probs=draft,
            generator=torch.Generator().manual_seed(5),
        )
        for _ in range(2)
    ]
    assert all(map(torch.equal, *results))
    assert torch.equal(torch.get_rng_state(), before)


@given(problems())
def test_what_must_not_be_read_is_not_read(problem):
    parents, tokens, target, draft, _ = problem
    tree = Tree(parents)
    shape = tokens.shape
    padding = ~tree.valid.expand(shape)
    unread = padding.clone()
    unread[:, 0] = True

    def run(tokens, target, draft):
        generator = torch.Generator().manual_seed(5)
        return accept(tree, tokens, target, draft_probs=draft, generator=generator)

    spoilt_tokens = tokens.masked_fill(unread, -(2**31)).int()
    spoilt_target = target.masked_fill(padding[..., None], float("nan"))
    if draft is not None:
        leaves = tree.is_leaf.expand(shape) | padding
        spoilt_draft = draft.masked_fill(leaves[..., None], float("nan"))
    else:
        spoilt_draft = None
    expected = run(tokens, target, draft)
    assert all(map(torch.equal, run(spoilt_tokens, spoilt_target, spoilt_draft), expected))


@given(problems(), st.integers(0, 99))
def test_greedy_decoding_is_the_argmax_walk(problem, seed):
    parents, tokens, _, _, generator = problem
    tree, vocab = Tree(parents), 6
    p = distributions.random_tables(vocab, tree.max_depth, seed)
    rows = tree.parents.expand(len(tokens), -1).tolist()
    target = torch.stack(
        [
            distributions.at_nodes(distributions.one_hot(p), row, tokens[b : b + 1])[0]
            for b, row in enumerate(rows)
        ]
    )
    continuation, number = [], 0
    for table in p:
        continuation.append(int(table[number].argmax()))
        number = number * vocab + continuation[-1]

    results = [
        accept(tree, tokens, target, generator=generator),
        accept(tree, tokens, target.bfloat16(), generator=generator),
        accept_samples(tree, tokens, target.argmax(-1)),
    ]
    for result in results:
        sequences, lengths = distributions.emitted(tokens, result)
        for b, row in enumerate(rows):
            drafted = {(): True}
            for node, path in enumerate(tree.paths.expand(len(tokens), -1, -1)[b].tolist()):
                if row[node] >= 0:
                    drafted[tuple(tokens[b, n].item() for n in path[1:] if n >= 0)] = True
            agreed = max(n for n in range(len(p)) if tuple(continuation[:n]) in drafted)
            assert sequences[b, : lengths[b]].tolist() == continuation[: agreed + 1]

    draft = torch.rand(target.shape, generator=generator)
    sampled = accept(tree, tokens, target, draft_probs=draft, generator=generator)
    for sequence, length in zip(*distributions.emitted(tokens, sampled), strict=True):
        assert sequence[:length].tolist() == continuation[:length]


@given(problems())
def test_laws_need_not_be_normalised(problem):
    parents, tokens, target, draft, _ = problem

    def run(scale):
        return accept(
            Tree(parents),
            tokens,
            target * scale,
            draft_probs=None if draft is None else draft / scale,
            generator=torch.Generator().manual_seed(5),
        )

    assert all(map(torch.equal, run(1), run(2.0**-20)))


def test_repeated_siblings_lose_no_continuation():
    """TokenSwift's n-grams repeat their key in every chain; each chain stays reachable."""
    tree = Tree([-1, 0, 1, 0, 3, 0, 5])
    tokens = torch.tensor([[0, 7, 1, 7, 2, 7, 3]])
    for wanted, node in ((1, 2), (2, 4), (3, 6)):
        samples = torch.tensor([[7] + [wanted] * 6])
        accepted = accept_samples(tree, tokens, samples)
        assert accepted.nodes.tolist() == [[node - 1, node]]
        assert accepted.counts.tolist() == [2]


def test_a_perfect_draft_is_accepted_whole():
    tree, distribution = Tree.chain(5), torch.rand(64, 6, 1000).softmax(-1)
    tokens = torch.randint(1000, (64, 6))
    accepted = accept(tree, tokens, distribution, draft_probs=distribution)
    assert accepted.counts.tolist() == [5] * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rejections_that_rounding_alone_makes_leave_a_law(monkeypatch, dtype):
    """Reject every child even where p and q agree or differ in the last bit."""
    real = acceptance.sample

    def contrary(weights, *, generator=None):
        refuses = weights.shape[-1] == 2
        return torch.zeros(len(weights), dtype=torch.int64) if refuses else real(weights)

    monkeypatch.setattr(acceptance, "sample", contrary)
    tree = Tree.full([3])
    target = torch.rand(500, 4, 50, dtype=torch.float64).pow(20)
    target = torch.where(torch.rand(target.shape) < 0.5, 0, target).to(dtype)
    for draft in (target, target * (1 + torch.finfo(dtype).eps)):
        tokens = torch.randint(50, (500, 4))
        accepted = accept(tree, tokens, target, draft_probs=draft)
        assert (target[:, 0].gather(-1, accepted.next_token[:, None]) > 0).all()
        assert (accepted.counts == 0).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_extreme_noise_still_draws_what_has_mass(monkeypatch, uniform):
    """The ends of the generator's range must not make 0 / 0 or 0 = 0 of the race."""
    full = torch.full
    monkeypatch.setattr(torch, "rand", lambda shape, dtype, **_: full(shape, uniform, dtype=dtype))
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7], [0.0, 0.0, 1e-30, 0.0]])
    assert acceptance.sample(probs).tolist() == [3, 2]


def test_nothing_waits_for_the_device():
    """Tensors on `meta` have shapes but no values: reading one would raise."""
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, -1]], device="meta")
    tree = Tree(parents, max_depth=2, max_width=2)
    tokens = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    distribution = torch.ones(2, 4, 9, device="meta")
    for result in (
        accept(tree, tokens, distribution),
        accept(tree, tokens, distribution, draft_probs=distribution),
        accept_samples(tree, tokens, tokens),
    ):
        assert [list(t.shape) for t in result] == [[2, 2], [2], [2]]


def test_unwritten_memory_is_never_read(poisoned_empty):
    tree, distribution = Tree.full([2, 2]), torch.rand(8, 7, 5)
    tokens = torch.randint(5, (8, 7))
    for draft in (None, distribution):
        accepted = accept(tree, tokens, distribution, draft_probs=draft)
        assert (accepted.next_token >= 0).all()
        assert (accepted.nodes >= -1).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"tokens": torch.zeros(2, 3, dtype=torch.int64)},
            ValueError,
            r"tokens must be \[B, T = 4",
        ),
        ({"tokens": torch.zeros(2, 4)}, TypeError, "tokens must be integer"),
        ({"tree": Tree([[-1, 0, 0, 0]] * 3)}, ValueError, "3 trees for 2 rows"),
        ({"target_probs": torch.zeros(2, 3, 5)}, ValueError, "target_probs must be"),
        ({"target_probs": torch.zeros(2, 4, 5).int()}, TypeError, "target_probs must be float"),
        ({"draft_probs": torch.zeros(2, 4, 6)}, ValueError, r"draft_probs must be \[2, 4, 5\]"),
        ({"target_probs": torch.zeros(2, 4, 5, device="meta")}, ValueError, "is on meta"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {
        "tree": Tree.chain(3),
        "tokens": torch.zeros(2, 4, dtype=torch.int64),
        "target_probs": torch.rand(2, 4, 5),
        "draft_probs": None,
    } | change
    tree, tokens, target = (arguments.pop(name) for name in ("tree", "tokens", "target_probs"))
    with pytest.raises(error, match=message):
        accept(tree, tokens, target, **arguments)
