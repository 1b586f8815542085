"""One level of a beam search in C++ against torch."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specattn import _cpu
from tests.cases import assert_accurate
from tests.cpu import calls
from tests.cpu.tensors import apart, normal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LUCK = 3e-6  # what torch may hit in sums of a few numbers of size one
per_isa = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def room(batch, width, words):
    """Return poisoned tokens, scores, parents and masks of some children."""
    whole = [calls.poisoned(batch, width, dtype=torch.int64) for _ in range(2)]
    masks = calls.poisoned(batch, width, words, dtype=torch.int64)
    return [whole[0], calls.poisoned(batch, width), whole[1], masks]


def best_children(logits, scores, width, first=0):
    """Return tokens, scores and parents of the best children; the masks have bits enough."""
    batch, nodes, _ = logits.shape
    words = (first + nodes + width + 63) // 64
    masks = torch.zeros(batch, nodes, words, dtype=torch.int64)
    found = room(batch, width, words)
    _cpu.best_children(logits, scores, masks, first, *found, 2)
    return found[:3]


def check(logits, scores, found, first=0):
    """Hold children against the best of float64; of two that float32 cannot tell apart any."""
    tokens, best, parents = found
    batch, nodes, vocabulary = logits.shape
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    assert ((parents >= first) & (parents < first + nodes)).all()
    places = (parents - first) * vocabulary + tokens
    assert all(len(row.unique()) == len(row) for row in places)
    assert (best[:, 1:] <= best[:, :-1]).all()
    exact, rough = [
        (logits.to(to).log_softmax(-1) + scores.to(to)[:, :, None]).flatten(1)
        for to in (torch.float64, torch.float32)
    ]
    width = tokens.shape[1]
    assert_accurate(best, exact.topk(width).values, rough.topk(width).values, atol=LUCK)
    assert_accurate(best, exact.gather(1, places), rough.gather(1, places), atol=LUCK)


@per_isa
@given(
    batch=st.integers(1, 3),
    nodes=st.integers(1, 9),
    vocabulary=st.sampled_from([1, 2, 7, 8, 15, 16, 17, 31, 33, 100, 515, 2051]),
    width=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_against_torch(isa, batch, nodes, vocabulary, width, dtype, strided, seed):
    (logits,) = normal(seed, (batch * nodes, vocabulary), dtype=dtype)
    logits *= 2
    logits = (apart(logits) if strided else logits).unflatten(0, (batch, nodes))
    (scores,) = normal(seed, (batch, nodes), dtype=torch.float32)
    width = min(width, nodes * vocabulary)
    check(logits, scores, best_children(logits, scores, width, first=5), first=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nodes", "vocabulary"), [(1, 1), (1, 37), (4, 16), (3, 19)])
def test_all_candidates(isa, dtype, nodes, vocabulary):
    (logits,) = normal(0, (2, nodes, vocabulary), dtype=dtype)
    (scores,) = normal(1, (2, nodes), dtype=torch.float32)
    check(logits, scores, best_children(logits, scores, nodes * vocabulary))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 30, 111])
def test_the_lower_node_then_the_lower_token_wins_a_tie(isa, dtype, width):
    row = torch.randint(4, (37,), generator=torch.Generator().manual_seed(width)).to(dtype)
    logits = row.expand(2, 3, 37).contiguous()  # equal rows have one sum, so ties are exact
    tokens, _, parents = best_children(logits, torch.zeros(2, 3), width)
    order = row.repeat(3).float().argsort(descending=True, stable=True)[:width]
    for b in range(2):
        assert torch.equal(parents[b] * 37 + tokens[b], order)


@pytest.mark.parametrize("dtype", DTYPES)
def test_impossible_tokens(isa, dtype):
    (logits,) = normal(0, (2, 3, 35), dtype=dtype)
    logits[:, :, 1::2] = -torch.inf  # 18 of 35 are left
    logits[1, 2, 1:] = -torch.inf  # a certain one
    scores = torch.tensor([[-1.0, -2, -0.5], [-torch.inf, -1, -3]])
    for width in (1, 18, 19, 54, 60):
        check(logits, scores, best_children(logits, scores, width))


def test_logits_far_from_zero(isa):
    (logits,) = normal(0, (1, 2, 50), dtype=torch.float32)
    (scores,) = normal(1, (1, 2), dtype=torch.float32)
    for shift in (-1e4, 1e4):
        check(logits + shift, scores, best_children(logits + shift, scores, 9))


def seen(words):
    """Return the bits of a mask as one number."""
    return sum((word & 2**64 - 1) << 64 * i for i, word in enumerate(words))


def test_levels_of_one_tree(isa):
    """The children of each level are written behind it; masks are the paths to the root."""
    batch, words, levels = 2, 3, [1, 40, 60, 70]
    tree = room(batch, 64 * words, words)
    tokens, scores, parents, masks = tree
    scores[:, 0], masks[:, 0] = 0, torch.tensor([1, 0, 0])
    first = 0
    for depth, width in enumerate(levels[1:]):
        level = slice(first, first + levels[depth])
        below = slice(level.stop, level.stop + width)
        before = [t.clone() for t in tree]
        (logits,) = normal(depth, (batch, levels[depth], 97), dtype=torch.float32)
        above = scores[:, level], masks[:, level]
        _cpu.best_children(logits, *above, first, *[t[:, below] for t in tree], 1)
        check(logits, above[0], [t[:, below] for t in tree[:3]], first)
        for now, was in zip(tree, before, strict=True):
            was[:, below] = now[:, below]
            torch.testing.assert_close(now, was, rtol=0, atol=0, equal_nan=True)
        first = level.stop
    for b in range(batch):
        for node in range(1, sum(levels)):
            parent = parents[b, node].item()
            assert seen(masks[b, node].tolist()) == seen(masks[b, parent].tolist()) | 1 << node
    assert sum(levels) > 2 * 64 + 32


def test_wrong_arguments(isa):
    logits, scores = torch.zeros(2, 3, 5), torch.zeros(2, 3)
    masks = torch.zeros(2, 3, 1, dtype=torch.int64)

    def call(width=4, first=0, **changes):
        names = ("best_tokens", "best_scores", "best_parents", "best_masks")
        arguments = {"logits": logits, "scores": scores, "masks": masks, "first": first}
        arguments |= dict(zip(names, room(2, width, 1), strict=True))
        _cpu.best_children(*(arguments | changes).values(), 1)

    call(first=57)
    for first in (-1, 58):
        with pytest.raises(IndexError, match=f"first: expected values from 0 to 57, got {first}"):
            call(first=first)
    for width in (0, 16):
        with pytest.raises(ValueError, match="best_tokens must be at least one"):
            call(width)
    for name, value in [
        ("logits", logits[0]),
        ("logits", logits.double()),
        ("scores", scores[:, :2].contiguous()),
        ("masks", masks.int()),
        ("best_scores", torch.zeros(2, 5)),
        ("best_parents", torch.zeros(2, 4)),
        ("best_masks", torch.zeros(2, 4, 2, dtype=torch.int64)),
    ]:
        with pytest.raises(ValueError, match=f"{name} must"):
            call(**{name: value})
    with pytest.raises(ValueError, match="must be laid out as"):
        call(best_scores=torch.zeros(2, 8)[:, :4])
