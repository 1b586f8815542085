"""Drafters by look-up as vLLM calls them: rows, lengths and a table of tokens."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the methods of decoding need it")
from specattn.integrations.vllm import PromptLookup, Suffix

CAPACITY = 32


def drafter(gamma=4, kind=PromptLookup):
    return kind(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=gamma),
            model_config=SimpleNamespace(max_model_len=CAPACITY),
        )
    )


def propose(drafter, texts, sampled=None):
    tokens = np.full((len(texts) + 1, CAPACITY), 99, dtype=np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts] + [0])
    sampled = sampled or [[text[-1]] for text in texts]
    return drafter.propose(sampled, lengths, tokens, slot_mappings={})


def test_it_copies_what_followed_the_last_tokens():
    assert propose(drafter(), [[1, 2, 3, 4, 5, 6, 1, 2], [7, 8]]) == [[3, 4, 5, 6], []]


def test_texts_grow_and_rows_move():
    one = drafter(gamma=2)
    a, b = [1, 2, 3, 1], [4, 5, 6, 4]
    assert propose(one, [a, b]) == [[2, 3], [5, 6]]
    assert propose(one, [[*b, 5, 9], [*a, 2]]) == [[], [3, 1]]
    assert propose(one, [[*b, 5, 9, 4, 5]]) == [[9, 4]]


def test_a_prompt_that_is_still_being_read_gets_no_draft():
    assert propose(drafter(), [[1, 2, 1], [1, 2, 1]], sampled=[[], [1]]) == [[], [2, 1]]


def test_no_draft_reaches_behind_the_longest_text():
    text = [1, 2] * ((CAPACITY - 2) // 2)
    assert propose(drafter(gamma=8), [text]) == [[1]]
    assert propose(drafter(gamma=8), [[*text, 1]]) == [[]]


@pytest.mark.parametrize(("longest", "found"), [(3, 8), (2, 9)])
def test_a_suffix_has_as_many_tokens_as_a_class_says(longest, found):
    kind = type("Shorter", (PromptLookup,), {"longest": longest})
    text = [1, 2, 3, 8, 2, 3, 9, 1, 2, 3]
    assert propose(drafter(gamma=1, kind=kind), [text]) == [[found]]


@pytest.fixture
def suffix(each_index):
    return drafter(kind=Suffix)


def test_suffix_drafts_the_most_probable_path(suffix):
    often, once = [1, 2, 3, 4], [1, 2, 9, 9]
    text = [*often, 8, *once, 7, *often, 6, *often, 5, 1, 2]
    assert propose(suffix, [text, [7, 8]]) == [[3, 4], []]
    assert propose(suffix, [[*text, 3]]) == [[4]]


def test_suffix_ends_where_the_path_is_less_probable_than_least(suffix):
    text = list(range(10)) * 3
    assert propose(suffix, [text]) == [[0]], "capacity leaves room for one"
    sure = Suffix(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=4),
            model_config=SimpleNamespace(max_model_len=99),
        )
    )
    wide = np.array([[*text, *[0] * 69]], dtype=np.int32)
    drafts = {}
    for sure.least in (0.2, 0.999):
        sure.requests = type(sure.requests)(sure.index)
        drafts[sure.least] = sure.propose([[9]], np.array([30]), wide)[0]
    assert drafts == {0.2: [0, 1, 2, 3], 0.999: []}
