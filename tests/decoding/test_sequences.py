"""Texts without padding for methods, with it for transformers."""

import torch
from transformers import StoppingCriteriaList

from specattn.decoding.sequences import RequestIndexes, Sequences


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
