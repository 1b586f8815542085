"""Rows without names are told apart by their texts."""

import numpy as np

from specattn.integrations.vllm.requests import Requests

CAPACITY = 16


class Rows:
    """vLLM's table of tokens, and what a drafter is told of it."""

    def __init__(self):
        self.requests = Requests(list)

    def step(self, texts):
        """Return each text's memory, after its new tokens were appended to it."""
        tokens = np.zeros((len(texts), CAPACITY), dtype=np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        lengths = np.array([len(text) for text in texts])
        rows = [row for row, text in enumerate(texts) if text]
        found = self.requests.of_rows(rows, lengths, tokens)
        for memory, new in found:
            memory.extend(new.tolist())
        return [memory for memory, _ in found]


def test_a_memory_holds_its_own_text_whatever_rows_do():
    rows = Rows()
    a, b, c = [1, 2, 3], [1, 2, 4], [7]
    first = rows.step([a, b, c])
    assert first == [a, b, c]
    a, b, c = [*a, 5], [*b, 5, 6], [*c, 8]
    moved = rows.step([c, b, a])
    assert moved == [c, b, a]
    assert [id(one) for one in moved] == [id(first[2]), id(first[1]), id(first[0])]


def test_a_request_that_has_no_row_is_forgotten():
    rows = Rows()
    (kept, _) = rows.step([[1, 2], [3, 4]])
    assert rows.step([[1, 2, 9]])[0] is kept
    assert rows.step([[3, 4, 5], [1, 2, 9, 9]]) == [[3, 4, 5], [1, 2, 9, 9]]
    assert len(rows.requests) == 2


def test_a_row_whose_text_another_request_has_now_starts_anew():
    rows = Rows()
    (old,) = rows.step([[1, 2, 3]])
    (new,) = rows.step([[1, 9, 3, 4]])
    assert new == [1, 9, 3, 4]
    assert old == [1, 2, 3]


def test_two_requests_of_one_text_have_a_memory_each():
    rows = Rows()
    a, b = rows.step([[1, 2], [1, 2]])
    assert a is not b
    a, b = rows.step([[1, 2, 3], [1, 2, 4]])
    assert (a, b) == ([1, 2, 3], [1, 2, 4])


def test_rows_without_a_token_are_left_out():
    rows = Rows()
    assert rows.step([[], [5]]) == [[5]]


def test_who_is_forgotten_is_said_before_another_is_made():
    said = []
    rows = Rows()
    rows.requests = Requests(lambda: said.append("made") or [], lambda gone: said.append(gone))
    rows.step([[1, 2], [3, 4]])
    rows.step([[3, 4, 5], [6]])
    assert said == ["made", "made", [1, 2], "made"]
