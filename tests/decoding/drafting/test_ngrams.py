"""The n-gram table against counting by hand, over long random texts."""

from collections import Counter
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding.drafting.ngrams import NGramTable
from tests.decoding.models import skewed_text


def counted(text, n):
    """Return the frequency of every n-gram of a text."""
    return Counter(zip(*(text[start:] for start in range(n)), strict=False))


def check(table, text, tokens, k):
    """Compare all that a table says of `tokens` with a count of `text`."""
    frequencies = counted(text, table.n)
    for first in tokens:
        expected = {gram[1:]: f for gram, f in frequencies.items() if gram[0] == first}
        best = table.continuations(first, k)
        assert len(set(best)) == len(best) == min(k, len(expected))
        descending = sorted(expected.values(), reverse=True)[:k]
        assert [expected[continuation] for continuation in best] == descending
        assert [table.frequency((first, *c)) for c in best] == descending


@pytest.mark.parametrize(("n", "vocabulary", "seed"), [(4, 12, 0), (4, 5000, 1), (2, 300, 2)])
def test_frequencies_are_exact_over_100_000_tokens(n, vocabulary, seed):
    text = skewed_text(100_000, vocabulary, seed)
    table = NGramTable(n)
    for start in range(0, len(text), 777):
        table.extend(text[start : start + 777])
    check(table, text, {*text[:20], *text[-20:], vocabulary}, k=20)


@pytest.mark.parametrize("window", [5, 1000, 4096])
def test_a_full_table_counts_what_its_window_holds(window):
    text = skewed_text(100_000, 30, seed=3)
    table = NGramTable(4, window)
    table.extend(text[:60_000])
    check(table, text[60_000 - window : 60_000], range(30), k=20)
    table.extend(text[60_000:])
    check(table, text[-window:], range(30), k=20)
    kept = sum(len(ranking.frequencies) for ranking in table._rankings.values())
    assert kept == len(counted(text[-window:], 4)), "what slid out of the window is forgotten"


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(2, 4), st.integers(4, 20))
def test_after_every_token(text, n, window):
    table = NGramTable(n, window)
    for end, token in enumerate(text, start=1):
        table.extend([token])
        check(table, text[max(0, end - window) : end], range(4), k=3)


def test_of_equally_frequent_ones_the_latest_comes_first():
    table = NGramTable(2)
    table.extend([0, 1, 0, 2, 0, 3, 0, 1, 0, 2, 0, 4])
    best = table.continuations(0, 9)
    assert best == [(2,), (1,), (4,), (3,)]
    frequencies = [table.frequency((0, *continuation)) for continuation in best]
    assert [len(list(same)) for _, same in groupby(frequencies)] == [2, 2]


@pytest.mark.parametrize(("arguments", "name"), [((1,), "n must"), ((4, 3), "window must")])
def test_parameters_out_of_range(arguments, name):
    with pytest.raises(ValueError, match=name):
        NGramTable(*arguments)
