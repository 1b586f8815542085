"""Common random numbers: every method continues with the same text, and that text is a sample."""

import json
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from studies import acceptance_spread  # noqa: E402
from tests.decoding.models import prompts, tiny_model  # noqa: E402
from tests.distributions import SIGNIFICANCE  # noqa: E402
from tests.drafters.poss_statement import random_drafter  # noqa: E402

from specattn.decoding import METHODS  # noqa: E402

SMALL = {"gamma": 3, "min_tokens": 8, "ratio": 0.1}


def test_the_noise_draws_from_the_distribution():
    scores = torch.randn(8, generator=torch.Generator().manual_seed(0))
    drawn = [
        acceptance_spread.PlacedNoise(0.7, seed)(torch.zeros(1, length), scores).argmax()
        for seed in range(20)
        for length in range(100)
    ]
    counts = torch.bincount(torch.stack(drawn), minlength=8)
    expected = (scores.double() / 0.7).softmax(-1) * len(drawn)
    assert chisquare(counts, expected).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_methods_continue_with_the_same_text(temperature):
    snapshot = acceptance_spread.counting(tiny_model(peak=4.0), prompts([60]), 24)
    methods = [METHODS[name](**SMALL) for name in ("vegas", "streaming", "quest", "triforce")]
    found = [acceptance_spread.measure(snapshot, one, 16, temperature, seed=1) for one in methods]
    assert len({one["continuation"] for one in found}) == 1
    for one in found:
        assert 1 <= one["tau"] <= one["drafting"] <= 4
    # Its 8 tokens and those of the chain before the step: 0 to 2.
    assert found[1]["read"] == pytest.approx(9.0, abs=0.3)


def test_trees_of_trained_drafters_see_the_same_text():
    model = tiny_model(peak=4.0)
    method = METHODS["poss"](random_drafter(model, dtype=torch.float32), depth=3)
    snapshot = acceptance_spread.counting(model, prompts([60]), 80, keep_features=True)
    plain, found = (
        acceptance_spread.measure(snapshot, one, 16, 1.0, seed=1)
        for one in (METHODS["vegas"](**SMALL), method)
    )
    assert found["continuation"] == plain["continuation"]
    assert found["read"] is None
    assert found["accepted_at"][0] <= found["offered_at"][0]
    text = acceptance_spread.by_position(
        [{"accepted_at": [3, 1], "offered_at": [4, 2]}, {"accepted_at": [1], "offered_at": [4]}]
    )
    assert text == "50.0% 50.0%"


def test_what_is_there_is_not_measured_again(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    names = ("vegas:gamma=3,min_tokens=16", "streaming:gamma=3,min_tokens=16")
    methods = [word for name in names for word in ("--method", name)]
    small = ["--context", "64", "--new-tokens", "8", "--json", str(path), *methods]
    assert acceptance_spread.main([*small, "--texts", "1"]) == 0
    kept = path.read_text().splitlines()
    assert acceptance_spread.main([*small, "--texts", "2"]) == 0
    lines = path.read_text().splitlines()
    assert lines[:4] == kept
    assert [(one["text"], one["method"]) for one in map(json.loads, lines[4:])] == [
        (1, name) for _ in range(2) for name in names
    ]
    printed = capsys.readouterr().out
    assert "64, T=1, 2 texts" in printed
    assert "2 of 2" in printed
