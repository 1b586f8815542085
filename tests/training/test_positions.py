"""Anchor-offset indices against the paper's pseudo code."""

import pytest
import torch
from scipy.stats import chisquare

from specattn.training import anchor_offset_positions


def algorithm_1(length, offset):
    """LongSpec v2, Algorithm 1, lines 3 and 5."""
    positions = list(range(length))
    for index in range(4, length):
        positions[index] += offset
    return positions


@pytest.mark.parametrize(("length", "max_length"), [(128, 16386), (5, 5), (9, 12)])
def test_rows_are_those_of_algorithm_1(length, max_length):
    positions = anchor_offset_positions(200, length, max_length)
    assert positions.shape == (200, length)
    for row in positions.tolist():
        offset = row[4] - 4
        assert 0 <= offset <= max_length - length
        assert row == algorithm_1(length, offset)
        assert row[-1] < max_length


def test_the_example_of_the_paper():
    assert algorithm_1(128, 16257)[:6] == [0, 1, 2, 3, 16261, 16262]


def test_every_offset_is_equally_likely_and_each_row_has_its_own():
    offsets = anchor_offset_positions(4000, 8, 8 + 9)[:, 4] - 4
    counts = torch.bincount(offsets, minlength=10)
    assert len(counts) == 10
    assert chisquare(counts.tolist()).pvalue > 1e-3


@pytest.mark.parametrize("length", [1, 4])
def test_rows_of_anchors_only_stay_where_they_are(length):
    assert anchor_offset_positions(1, length, 100).tolist() == [list(range(length))]


def test_rows_beyond_the_model_are_refused():
    with pytest.raises(ValueError, match="rows of 65 tokens exceed the target's 64"):
        anchor_offset_positions(1, 65, 64)
