"""`accept` against the target's distribution, and the published rules that fail this test.

One call with many rows is many trials. What is compared is the joint distribution of the first
tokens emitted, completed from the target where a row emitted fewer, so that a rule which gets the
first token right but ends a path at the wrong time is caught too.
"""

import itertools

import pytest
import torch

from specattn.acceptance import accept, sample, sample_children
from specattn.tree import Tree
from tests import distributions

ROWS = 100_000
DEVICES = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


def draft_children(parents, tables, generator, rows=ROWS):
    """Sample every node's children from `tables`, given the node's own path."""
    tokens = torch.zeros(rows, len(parents), dtype=torch.int64)
    for node in range(len(parents)):
        children = [n for n, parent in enumerate(parents) if parent == node]
        if children:
            distribution = distributions.at_nodes(tables, parents[: node + 1], tokens)[:, node]
            tokens[:, children] = sample_children(distribution, len(children), generator=generator)
    return tokens


def best_children(parents, tables):
    """Draft the most probable tokens of `tables` instead: one row, the same for all requests."""
    tokens = torch.zeros(1, len(parents), dtype=torch.int64)
    for node in range(len(parents)):
        children = [n for n, parent in enumerate(parents) if parent == node]
        if children:
            distribution = distributions.at_nodes(tables, parents[: node + 1], tokens)[:, node]
            tokens[:, children] = distribution.topk(len(children)).indices
    return tokens


def tempered(tables, temperature):
    return [table.log().div(temperature).softmax(-1) for table in tables]


def mixed(tables, other, share):
    return [share * a + (1 - share) * b for a, b in zip(tables, other, strict=True)]


VOCAB, DEPTH = 5, 2
P = distributions.random_tables(VOCAB, DEPTH, seed=1)
Q = distributions.random_tables(VOCAB, DEPTH, seed=2)
PAIRS = {
    "unlike": (P, Q),
    "alike": (P, mixed(P, Q, 0.9)),
    "cold-target": (tempered(P, 0.3), Q),
    "hot-target": (tempered(P, 2.5), P),
    "near-one-hot": (tempered(P, 0.05), tempered(Q, 0.2)),
    "opposite": (tempered(P, 0.5), tempered(P, -0.5)),
}
TREES = {
    "chain": Tree.chain(2),
    "full": Tree.full([3, 2]),
    "crooked": Tree([-1, 0, 0, 2, 2, 2, 0]),
    "ragged": Tree.stack([Tree.chain(2), Tree.full([2, 2]), Tree.chain(0), Tree.full([4])]),
}


def third_token_p_values(pair, shape, *, sampled, device="cpu", dtype=torch.float64):
    """Run `accept` on many rows of one draft kind; return a p-value for each tree of the batch."""
    (p, q), tree = PAIRS[pair], TREES[shape]
    generator = torch.Generator().manual_seed(7)
    kinds = tree.parents.tolist() if tree.batch_size else [tree.parents.tolist()]
    rows = ROWS // len(kinds)
    tokens, target, drafted = [], [], []
    q = [table.to(dtype).double() for table in q]
    for parents in kinds:
        if sampled:
            tokens.append(draft_children(parents, q, generator, rows))
        else:
            tokens.append(best_children(parents, q).expand(rows, -1))
        drafted.append(distributions.at_nodes(q, parents, tokens[-1]))
        target.append(distributions.at_nodes(p, parents, tokens[-1]))
    tokens, target, drafted = torch.cat(tokens), torch.cat(target), torch.cat(drafted)
    batch = Tree(tree.parents.repeat_interleave(rows, dim=0)) if tree.batch_size else tree

    accepted = accept(
        batch.to(device),
        tokens.to(device),
        target.to(device, dtype),
        draft_probs=drafted.to(device, dtype) if sampled else None,
        generator=torch.Generator(device).manual_seed(11),
    )
    accepted = type(accepted)(*(part.cpu() for part in accepted))
    p = [table.to(dtype).double() for table in p]
    p = [table / table.sum(-1, keepdim=True) for table in p]
    number = distributions.complete(p, *distributions.emitted(tokens, accepted), generator)
    return [distributions.p_value(kind, distributions.joint(p)) for kind in number.split(rows)]


def cases():
    """Yield every pair with every tree; those in which neither is the usual one are slow.

    `test_acceptance.py` enumerates pairs and trees; only how they are drawn is left to be tried.
    """
    for pair, shape in itertools.product(PAIRS, TREES):
        usual = pair == "unlike" or shape == "crooked"
        yield pytest.param(pair, shape, marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampled", [False, True], ids=["deterministic", "sampled"])
@pytest.mark.parametrize(("pair", "shape"), list(cases()))
def test_the_first_three_tokens_follow_the_target(pair, shape, sampled, device):
    for p_value in third_token_p_values(pair, shape, sampled=sampled, device=device):
        assert p_value > distributions.SIGNIFICANCE


@pytest.mark.parametrize("sampled", [False, True], ids=["deterministic", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_laws_of_low_precision_are_taken_at_their_word(dtype, sampled):
    """bf16 rows sum to 1 only within 1e-2: they must come out normalised."""
    (p_value,) = third_token_p_values("unlike", "full", sampled=sampled, dtype=dtype)
    assert p_value > distributions.SIGNIFICANCE


@pytest.mark.parametrize("draft", [None, Q], ids=["deterministic", "sampled"])
def test_each_request_follows_its_own_law(draft):
    """Neighbours with other distributions and other drafts in the same batch change nothing."""
    tree, generator = Tree.full([2]), torch.Generator().manual_seed(3)
    parents, rows = tree.parents.tolist(), ROWS // 2
    sharp, flat = tempered(P, 0.2)[:2], tempered(Q, 3.0)[:2]
    tokens = draft_children(parents, Q, generator)
    if draft is None:
        tokens = tokens[:1].expand(ROWS, -1).contiguous()
    order = torch.randperm(ROWS, generator=generator)
    target = torch.cat(
        [
            distributions.at_nodes(p, parents, t)
            for p, t in zip((sharp, flat), tokens.split(rows), strict=True)
        ]
    )
    draft_probs = None if draft is None else distributions.at_nodes(draft, parents, tokens)[order]
    shuffled = accept(tree, tokens[order], target[order], draft_probs=draft_probs)
    accepted = type(shuffled)(*(part[order.argsort()] for part in shuffled))
    sequences, lengths = distributions.emitted(tokens, accepted)
    for p, part in ((sharp, slice(0, rows)), (flat, slice(rows, None))):
        number = distributions.complete(p, sequences[part], lengths[part], generator)
        assert distributions.p_value(number, distributions.joint(p)) > distributions.SIGNIFICANCE


@pytest.mark.parametrize("device", DEVICES)
def test_drawing_without_replacement_is_sequential(device):
    """Ordered pairs come with q(x) q(y) / (1 - q(x)); a hole in q is drawn only at the end."""
    q = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], dtype=torch.float64)
    pair_law = q[:, None] * q / (1 - q[:, None]) * (1 - torch.eye(5))
    generator = torch.Generator(device).manual_seed(1)
    drawn = sample_children(q.to(device).expand(ROWS, 5), 5, generator=generator).cpu()
    assert (
        distributions.p_value(drawn[:, 0] * 5 + drawn[:, 1], pair_law.flatten())
        > distributions.SIGNIFICANCE
    )
    assert (drawn[:, 4] == 1).all()
    single = sample(q.to(device).expand(ROWS, 5), generator=generator).cpu()
    assert distributions.p_value(single, q) > distributions.SIGNIFICANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nothing_waits_for_the_gpu():
    tree = Tree.full([4, 2, 2]).to("cuda")
    tokens = torch.randint(50, (8, tree.size), device="cuda")
    distribution = torch.rand(8, tree.size, 50, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        accept(tree, tokens, distribution)
        accept(tree, tokens, distribution, draft_probs=distribution)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# From here on: rules that published programs use. Each must fail the test that `accept` passes.


# Wrong is wrong by far: a wrong rule must be told from the right one beyond any doubt.


def looks_like(samples, distribution):
    return distributions.p_value(samples, distribution) > distributions.SIGNIFICANCE


def is_far_from(samples, distribution):
    return distributions.p_value(samples, distribution) < 1e-12


def first_tokens(parents, tokens, p, draft_probs=None):
    """Return the first token that `accept` emits in each row."""
    target = distributions.at_nodes(p, parents, tokens)
    accepted = accept(Tree(parents), tokens, target, draft_probs=draft_probs)
    return distributions.emitted(tokens, accepted)[0][:, 0]


def try_siblings(p, q, tokens, rule):
    """Try siblings [B, k] one after the other as `rule` says, then draw from what is left of p.

    ``rule(p, q, x, number)`` returns the acceptance probability [B, 1] and p and q after a
    rejection; `number` is the sibling's node number in the tree.
    """
    p, q = p.expand(len(tokens), -1), q.expand(len(tokens), -1)
    emitted = torch.full((len(tokens),), -1)
    for number, x in enumerate(tokens.unbind(-1), start=1):
        chance, p, q = rule(p, q, x[:, None], number)
        accepted = (torch.rand(len(x)) < chance[:, 0]) & (emitted < 0)
        emitted = torch.where(accepted, x, emitted)
    return torch.where(emitted < 0, sample(p), emitted)


def ratio(p, q, x):
    return p.gather(-1, x) / q.gather(-1, x)


def residual(p, q):
    left = (p - q).clamp_min(0)
    return left / left.sum(-1, keepdim=True)


def without(q, x):
    left = q.scatter(-1, x, 0.0)
    return left / left.sum(-1, keepdim=True)


def textbook(p, q, x, number):
    return ratio(p, q, x), residual(p, q), without(q, x)


def target_after_rejection(p, q, x, number):
    """LongSpec's chains: what follows a rejection is drawn from p, not from the residual."""
    return ratio(p, q, x), p, without(q, x)


def node_number_for_token(p, q, x, number):
    """LongSpec's trees: p and q are read at the node's number instead of its token."""
    node = torch.full_like(x, number)
    return ratio(p, q, node), residual(p, q), without(q, x)


def draft_not_renormalised(p, q, x, number):
    """LongSpec's trees: the rejected token leaves q, which is not normalised again."""
    return ratio(p, q, x), residual(p, q), q.scatter(-1, x, 0.0)


def draft_not_reduced(p, q, x, number):
    """SpecInfer's rule for independent samples, used on samples without replacement."""
    return ratio(p, q, x), residual(p, q), q


@pytest.mark.parametrize(
    "wrong_rule",
    [target_after_rejection, node_number_for_token, draft_not_renormalised, draft_not_reduced],
)
def test_wrong_sibling_rules_are_caught(wrong_rule):
    parents, (p, q) = [-1, 0, 0, 0], (P[0], Q[0])
    tokens = draft_children(parents, Q, torch.Generator().manual_seed(5))
    distribution = p[0]
    assert is_far_from(try_siblings(p, q, tokens[:, 1:], wrong_rule), distribution)
    assert looks_like(try_siblings(p, q, tokens[:, 1:], textbook), distribution)
    assert looks_like(
        first_tokens(parents, tokens, P, distributions.at_nodes(Q, parents, tokens)), distribution
    )


def test_siblings_drawn_with_replacement_stay_exact():
    """SpecInfer draws independent siblings: repeats are passed over, the rest is as if distinct."""
    parents = [-1, 0, 0, 0]
    tokens = torch.multinomial(Q[0].expand(ROWS, -1), 4, replacement=True)
    assert looks_like(
        first_tokens(parents, tokens, P, distributions.at_nodes(Q, parents, tokens)), P[0][0]
    )


@pytest.mark.parametrize("offered", ["once-above-27-leaves", "27-times"])
def test_tokens_offered_on_many_leaves_are_not_favoured(offered):
    """TokenSwift samples the target anew for every leaf, and any match is accepted.

    A drafted token of probability 0.10 is then emitted by 94% of the steps of its default tree.
    """
    distribution = torch.tensor([0.10, 0.40, 0.30, 0.15, 0.05], dtype=torch.float64)
    tree = Tree.full([1, 3, 3, 3]) if offered == "once-above-27-leaves" else Tree.full([27])
    rows = ROWS // 4
    tokens = torch.zeros(rows, tree.size, dtype=torch.int64)
    target = distribution.expand(rows, tree.size, -1)

    per_leaf = torch.multinomial(distribution, rows * 27, replacement=True).view(rows, 27)
    wrong = torch.where((per_leaf == 0).any(-1), 0, per_leaf[:, 0])
    assert wrong.eq(0).double().mean() > 0.9
    assert is_far_from(wrong, distribution)

    right = distributions.emitted(tokens, accept(tree, tokens, target))[0][:, 0]
    assert looks_like(right, distribution)


def test_a_mismatch_emits_the_sample_that_mismatched():
    """TokenSwift draws anew after the last match: the draft gets a second chance."""
    distribution, drafted = P[0][0], int(P[0][0].argmin())
    match, anew = sample(distribution.expand(2, ROWS, -1)).unbind()
    assert is_far_from(torch.where(match == drafted, drafted, anew), distribution)
    tokens = torch.tensor([[0, drafted]]).expand(ROWS, -1)
    assert looks_like(first_tokens([-1, 0], tokens, P), distribution)


@pytest.mark.parametrize("parents", [[-1, 0], [-1, 0, 0]], ids=["chain", "tree"])
def test_best_tokens_are_not_scored_as_samples(parents):
    """LongSpec drafts argmax (chains) and top-k (trees) and tests them with p / q, as if drawn."""
    tokens = best_children(parents, Q).expand(ROWS, -1)
    assert is_far_from(try_siblings(P[0], Q[0], tokens[:, 1:], textbook), P[0][0])
    assert looks_like(first_tokens(parents, tokens, P), P[0][0])


def test_the_bonus_token_is_shaped_like_the_others():
    """PosS and HASS draw the token after a wholly accepted path from the unprocessed logits."""
    raw, processed = P, tempered(P, 0.5)
    tokens = best_children([-1, 0], processed).expand(ROWS, -1)
    target = distributions.at_nodes(processed, [-1, 0], tokens)
    sequences, lengths = distributions.emitted(tokens, accept(Tree.chain(1), tokens, target))
    whole = lengths == 2
    distribution = processed[1][tokens[0, 1]]
    assert looks_like(sequences[whole, 1], distribution)
    assert is_far_from(sample(raw[1][tokens[whole, 1]]), distribution)


def test_the_draft_law_is_the_one_that_was_sampled():
    """Vegas scores with q before the penalties and filters that its draft was sampled with."""
    parents = [-1, 0]
    sampled_from = [table.clone() for table in Q]
    sampled_from[0][0, P[0][0].argmax()] *= 0.2  # a penalty
    sampled_from[0] /= sampled_from[0].sum(-1, keepdim=True)
    tokens = draft_children(parents, sampled_from, torch.Generator().manual_seed(5))
    wrong, right = (distributions.at_nodes(q, parents, tokens) for q in (Q, sampled_from))
    assert is_far_from(first_tokens(parents, tokens, P, wrong), P[0][0])
    assert looks_like(first_tokens(parents, tokens, P, right), P[0][0])


def test_the_first_token_is_sampled_too():
    """LongSpec takes the argmax for the token after the prompt at every temperature."""
    tokens = torch.zeros(ROWS, 1, dtype=torch.int64)
    assert is_far_from(P[0].argmax(-1).expand(ROWS), P[0][0])
    assert looks_like(first_tokens([-1], tokens, P), P[0][0])
