"""Texts without padding for methods, with it for transformers."""

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from specattn.decoding.text.sequences import RequestIndexes, Sequences, StopRequest
from tests.decoding.fake_gpu import FakeGPU


def started(num_pregenerated=0):
    """Return texts of 2, 4 and 3 tokens in rows of 4, with room for 5 more."""
    rows = torch.tensor([[0, 0, 11, 12], [21, 22, 23, 24], [0, 31, 32, 33]])
    return Sequences(
        rows, [2, 0, 1], 9, StoppingCriteriaList(), torch.device("cpu"), num_pregenerated
    )


def test_texts_show_no_padding():
    sequences = started()
    sequences.extend(0, [13, 14])
    sequences.extend(2, [34])
    assert [prompt.tolist() for prompt in sequences.prompts] == [
        [11, 12],
        [21, 22, 23, 24],
        [31, 32, 33],
    ]
    assert [sequences.text(row).tolist() for row in range(3)] == [
        [11, 12, 13, 14],
        [21, 22, 23, 24],
        [31, 32, 33, 34],
    ]
    assert [sequences.generated(row).tolist() for row in range(3)] == [[13, 14], [], [34]]
    assert sequences.lengths == [4, 4, 4]
    assert sequences.room == 5


def test_positions_are_looked_up_in_the_running_requests():
    sequences = started()
    sequences.extend(2, [34])
    sequences.active = [2, 0]
    positions = torch.tensor([[0, 3], [1, 0]])
    assert sequences.tokens_at(positions).tolist() == [[31, 34], [12, 11]]
    assert sequences.active_lengths == [4, 2]
    sequences.tokens_at(torch.tensor([[8], [8]]))  # behind every text: anything, but no error


def test_transformers_sees_padded_rows():
    sequences = started()
    sequences.extend(1, [25])
    assert sequences.padded_rows[0, :4].tolist() == [0, 0, 11, 12]
    assert sequences.padded_rows[1, :6].tolist() == [21, 22, 23, 24, 25, 0]
    assert sequences.padded(7).tolist() == [
        [0, 0, 11, 12, 7],
        [21, 22, 23, 24, 25],
        [0, 31, 32, 33, 7],
    ]


class Ends(StoppingCriteria):
    """A criterion that is asked like one of transformers'."""

    def __init__(self, token):
        self.token, self.shown = token, []

    def __call__(self, input_ids, scores, **_):
        self.shown.append(input_ids.tolist())
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize(
    ("new", "emitted", "finished"),
    [
        ([1, 2, 3], [1, 2, 3], False),
        ([1, 8, 3], [1, 8], True),
        ([1, 9, 3], [1, 9], True),
        ([5, 2, 3], [5], True),
        ([1, 2, 3, 4, 1, 1], [1, 2, 3, 4], True),
    ],
)
def test_a_row_ends_where_transformers_criteria_say(new, emitted, finished):
    other = Ends(5)
    criteria = StoppingCriteriaList(
        [MaxLengthCriteria(8), EosTokenCriteria([8, 9]), other, StopRequest()]
    )
    sequences = Sequences(torch.tensor([[1, 2, 3, 4]]), [0], 14, criteria, torch.device("cpu"))
    assert sequences.extend(0, new) == (emitted, finished)
    assert sequences.new_tokens(0) == emitted
    texts = [[[1, 2, 3, 4, *emitted[: n + 1]]] for n in range(len(emitted))]
    assert other.shown == texts
    said = [bool(criteria(torch.tensor(text), None)) for text in texts]
    assert said == [False] * (len(emitted) - 1) + [finished]


def test_a_row_ends_on_request():
    stop = StopRequest()
    rows, criteria = torch.tensor([[1, 2]]), StoppingCriteriaList([stop])
    sequences = Sequences(rows, [0], 9, criteria, torch.device("cpu"))
    assert sequences.extend(0, [3]) == ([3], False)
    stop.asked = True
    assert sequences.extend(0, [4, 5]) == ([4], True)


def test_a_path_is_shown_behind_a_text_and_leaves_no_trace():
    sequences = started()
    assert sequences.continued(2, [7, 8]).tolist() == [[0, 31, 32, 33, 7, 8]]
    assert sequences.continued(2, []).tolist() == [[0, 31, 32, 33]]
    sequences.extend(2, [34])
    assert sequences.text(2).tolist() == [31, 32, 33, 34]
    assert sequences.padded(9)[2].tolist() == [0, 31, 32, 33, 34]


class Text(list):
    """An index that only remembers."""


def test_indexes_get_every_token_once_and_in_order():
    sequences = started(num_pregenerated=1)
    whole = RequestIndexes(sequences, Text, prompts=True)
    new = RequestIndexes(sequences, Text, prompts=False)
    assert new.active == [[12], [24], [33]]
    for tokens in ([13], [14, 15]):
        sequences.extend(0, tokens)
        whole.catch_up()
        new.catch_up()
    sequences.active = [1, 0]
    sequences.extend(1, [25])
    whole.catch_up()
    assert whole.active == [[21, 22, 23, 24, 25], [11, 12, 13, 14, 15]]
    assert new.active == [[24], [12, 13, 14, 15]]


def test_on_a_gpu_tokens_are_looked_up_without_a_wait():
    gpu, device = FakeGPU(), torch.device("cuda", 0)
    with gpu.serving():
        rows = [torch.tensor([9, 11, 12]), torch.tensor([21, 22, 23, 24])]
        criteria = StoppingCriteriaList([MaxLengthCriteria(9)])
        sequences = Sequences(rows, [1, 0], 9, criteria, device)
        positions = torch.zeros(2, 2, dtype=torch.int64, device=device) + 1
        gpu.waits.clear()
        found = sequences.tokens_at(positions)
        assert gpu.waits == []
        assert found.tolist() == [[12, 12], [22, 22]]
