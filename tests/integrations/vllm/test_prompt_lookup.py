"""Prompt lookup as vLLM calls it: rows, lengths and a table of tokens."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the methods of decoding need it")
from specattn.integrations.vllm import PromptLookup

CAPACITY = 32


def drafter(gamma=4, longest=None):
    return PromptLookup(
        SimpleNamespace(
            speculative_config=SimpleNamespace(
                num_speculative_tokens=gamma, prompt_lookup_max=longest
            ),
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


def test_prompt_lookup_max_is_the_longest_suffix():
    text = [1, 2, 3, 8, 2, 3, 9, 1, 2, 3]
    assert propose(drafter(gamma=1, longest=3), [text]) == [[8]]
    assert propose(drafter(gamma=1, longest=2), [text]) == [[9]]
