"""Corpora of suffix drafting: the index of all suffixes against searching lists, and the merge."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

_cpu = pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")

LONGEST, END = 63, -1
TOKENS = st.integers(1, 4).flatmap(lambda kinds: st.lists(st.integers(END, kinds), max_size=80))
TEXTS = st.integers(1, 4).flatmap(lambda kinds: st.lists(st.integers(0, kinds), max_size=40))


def corpus(tokens, vocabulary=100):
    text = torch.tensor(tokens, dtype=torch.int32)
    order = torch.empty_like(text)
    _cpu.sort_suffixes(text, order)
    return _cpu.Corpus(text, order, vocabulary)


def after(tokens, run):
    """Return where a run ends in a list of tokens, before its next token."""
    ends = range(len(run), len(tokens) + 1)
    return [end for end in ends if tokens[end - len(run) : end] == run]


def longest(tokens, context):
    lengths = range(min(len(context), LONGEST), -1, -1)
    return next(n for n in lengths if not n or after(tokens, context[len(context) - n :]))


@given(tokens=TOKENS)
def test_suffixes_are_in_order(tokens):
    text = torch.tensor(tokens, dtype=torch.int32)
    order = torch.empty_like(text)
    _cpu.sort_suffixes(text, order)
    expected = sorted(range(len(tokens)), key=lambda at: (tokens[at : at + LONGEST + 1], at))
    assert order.tolist() == expected


@given(tokens=TOKENS, context=TEXTS)
def test_the_longest_match_and_what_followed_it(tokens, context):
    length, followers = corpus(tokens).followers(context, 100)
    assert length == longest(tokens, context)
    run = context[len(context) - length :]
    counts = Counter(tokens[end] for end in after(tokens, run) if end < len(tokens))
    counts.pop(END, None)
    assert dict(followers) == counts
    assert [times for _, times in followers] == sorted(counts.values(), reverse=True)


def test_matches_are_cut_at_the_longest():
    tokens = [1] * 200
    assert corpus(tokens).followers([1] * 100, 4) == (LONGEST, [(1, 200 - LONGEST)])


def test_the_frequent_followers_of_a_frequent_token_are_found():
    generator = torch.Generator().manual_seed(1)
    rare = torch.randint(3, 90, (300,), generator=generator).tolist()
    tokens = [t for other in rare for t in (0, other, 0, 1)] + [0, 2] * 200
    length, followers = corpus(tokens).followers([0], 3)
    counts = Counter(tokens[end] for end in after(tokens, [0]))
    assert length == 1
    assert followers[:2] == counts.most_common(2) == [(1, 300), (2, 200)]


@given(text=TEXTS, tokens=TOKENS, nodes=st.integers(1, 30), depth=st.integers(1, 6))
def test_a_draft_of_both_is_a_tree_of_what_occurred(text, tokens, nodes, depth):
    drafter = _cpu.SuffixDrafter([corpus(tokens)])
    drafter.extend(text)
    parents, drafted, probabilities = drafter.draft(nodes, depth)
    assert len(drafted) <= nodes
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(0 < p <= 1 + 1e-6 for p in probabilities)
    assert len(set(zip(parents, drafted, strict=True))) == len(drafted), "siblings share a token"
    paths = [[]]
    for number, (parent, token) in enumerate(zip(parents, drafted, strict=True)):
        assert parent < number
        paths.append([*paths[parent + 1], token])
        assert len(paths[-1]) <= depth
        bigram = (text + paths[-1])[-2:]
        assert after(tokens, bigram) or after(text, bigram), "it never came before"


@given(text=TEXTS.filter(len), tokens=TOKENS)
def test_the_longest_match_of_either_decides_first(text, tokens):
    drafter = _cpu.SuffixDrafter([corpus(tokens)])
    drafter.extend(text)
    own = drafter.match
    length = longest(tokens, text)
    _, drafted, _ = drafter.draft(40, 1)
    followers = {token for token, _ in corpus(tokens).followers(text, 16)[1]} if length else set()
    of_text = {text[end] for end in after(text, text[len(text) - own :]) if end < len(text)}
    expected = of_text if own else set()
    assert expected | followers <= set(drafted)


@pytest.mark.parametrize("copies", [1, 20])
def test_the_own_text_wins_at_equal_length(copies):
    text = [7, 8, 1, 9, 7, 8]
    drafter = _cpu.SuffixDrafter([corpus([7, 8, 2, END] * copies)])
    drafter.extend(text)
    _, tokens, probabilities = drafter.draft(2, 1)
    assert tokens == [1, 2]
    assert probabilities[0] > probabilities[1]


def test_a_longer_match_of_a_corpus_wins():
    drafter = _cpu.SuffixDrafter([corpus([5, 6, 4, 7, 8, 2, 3, 1])])
    drafter.extend([9, 8, 1, 4, 7, 8])
    _, tokens, _ = drafter.draft(8, 8)
    assert tokens[:2] == [2, 3]
    assert 1 in tokens


def test_a_corpus_that_misleads_is_trusted_less():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(8, (400,), generator=generator).tolist()
    text = torch.randint(8, (400,), generator=generator).tolist()
    sums = []
    for given_text in (text, tokens[:300]):
        drafter = _cpu.SuffixDrafter([corpus(tokens)])
        drafter.extend(given_text)
        sums.append(sum(drafter.draft(8, 8)[2]))
    assert sums[1] > 1.5 * sums[0]


def test_several_corpora_are_merged():
    drafter = _cpu.SuffixDrafter([corpus([1, 2, 3]), corpus([1, 2, 4]), corpus([])])
    drafter.extend([1, 2])
    assert set(drafter.draft(4, 1)[1]) == {3, 4}


def test_without_corpora_a_draft_is_the_same():
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    plain, beside = _cpu.SuffixDrafter(), _cpu.SuffixDrafter([corpus([9, 9, 9])])
    plain.extend(text)
    beside.extend(text)
    assert plain.draft(20, 5) == beside.draft(20, 5)


@pytest.mark.parametrize(
    ("tokens", "order", "message"),
    [
        ([1, 100], [0, 1], "tokens: expected -1 to 99, got 100 at 1"),
        ([1, -2], [0, 1], "tokens: expected -1 to 99, got -2 at 1"),
        ([1, 2], [0, 2], "order: expected 0 to 1, got 2 at 1"),
        ([1, 2], [-1, 0], "order: expected 0 to 1, got -1 at 0"),
        ([1, 2], [0], "order must be"),
        ([1.0], [0], "tokens must be .* int32"),
        ([[1]], [0], "tokens must be"),
    ],
)
def test_arrays_that_are_no_index_are_refused(tokens, order, message):
    given_tokens = torch.tensor(tokens)
    if not given_tokens.is_floating_point():
        given_tokens = given_tokens.int()
    with pytest.raises(ValueError, match=message):
        _cpu.Corpus(given_tokens, torch.tensor(order, dtype=torch.int32), 100)
