"""A near-tie that rounding decides is counted; a fault, or many ties, are not excused."""

from functools import partial

import pytest

from specattn.decoding import generate
from tests.decoding import rounding_ties
from tests.decoding.models import prompts, tiny_model
from tests.decoding.rounding_ties import Recording, RoundingTies

DRAWN = {"temperature": 1.3, "seed": 5}


def plainly(**how):
    given, model = prompts([9, 30], vocabulary=24), tiny_model(vocab_size=24, peak=1.0)
    how = {"max_new_tokens": 8, "kv_dtype": "fp8", "top_k": 0, **how}
    return partial(generate, model, given, "plain", **how)


def with_other(texts, row, token):
    """Return texts of which one parts at its fourth token."""
    return [[*x[:3], token, *x[4:]] if n == row else x for n, x in enumerate(texts)]


@pytest.mark.parametrize(("row", "length"), [(0, 9), (1, 30)])
def test_texts_may_part_where_logits_are_near(monkeypatch, row, length):
    plain, recording, ties = plainly(temperature=0), Recording(), RoundingTies()
    output = plain(logits_processor=[recording])
    logits = recording.scores[tuple(output.sequences[row][: length + 3].tolist())]
    (first, second), (own, other) = (x.tolist() for x in logits.topk(2))
    found = with_other(output.new_tokens, row, other)
    assert own == output.new_tokens[row][3]
    monkeypatch.setattr(rounding_ties, "NEAR", first - second + 1e-6)
    ties.check(output.new_tokens, output.new_tokens, plain)
    ties.check(found, output.new_tokens, plain)
    assert (ties.runs, ties.gaps) == (2, [pytest.approx(first - second)])
    monkeypatch.setattr(rounding_ties, "NEAR", first - second - 1e-6)
    with pytest.raises(AssertionError, match=f"row {row}: {other} for {own} at 3, .* apart"):
        ties.check(found, output.new_tokens, plain)


def test_what_a_seed_draws_is_drawn_again(monkeypatch):
    plain, ties = plainly(**DRAWN), RoundingTies()
    expected = plain().new_tokens
    found = with_other(expected, 1, (expected[1][3] + 1) % 24)
    for near, seed, refused in ((1e9, 5, False), (0, 5, True), (1e9, 6, True)):
        monkeypatch.setattr(rounding_ties, "NEAR", near)
        if refused:
            with pytest.raises(AssertionError):
                ties.check(found, expected, plain, **DRAWN | {"seed": seed})
        else:
            ties.check(found, expected, plain, **DRAWN)
            assert ties.gaps[0] > 0


def test_few_runs_may_part():
    ties = RoundingTies()
    ties.runs, ties.gaps = 99, [0.01]
    ties.check_share()
    ties.gaps = [0.01, 0.01]
    with pytest.raises(AssertionError, match="2 of 99"):
        ties.check_share()
    ties.runs = 100
    ties.check_share()
