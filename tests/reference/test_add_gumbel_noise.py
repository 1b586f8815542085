"""The reference's generator against known answers, and its noise against statistics."""

import math

import pytest
import torch
from scipy import stats
from specattn.reference import add_gumbel_noise
from specattn.reference.add_gumbel_noise import philox

from tests import distributions

# The vectors for philox4x32-10 that come with the authors' library (Random123, kat_vectors).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def noise(seed, requests, positions, vocabulary):
    logits = torch.zeros(len(requests), vocabulary, dtype=torch.float64)
    return add_gumbel_noise(logits, seed, torch.tensor(requests), torch.tensor(positions))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_generator_gives_the_known_answers(counter, key, words):
    assert [int(x) for x in philox([torch.tensor(c) for c in counter], key)] == words


@pytest.mark.parametrize("token", [0, 255, 256, 1023, 1024, 2500])
def test_which_word_is_a_tokens_own(token):
    """Written out for one token; the greatest seed, request and position wrap nothing."""
    seed, request, position = 2**64 - 3, 2**32 - 1, 2**32 - 2
    counter = token // 1024 * 256 + token % 256
    words = philox(
        [torch.tensor(c) for c in (counter, position, request, 0)], (2**32 - 3, 2**32 - 1)
    )
    u = ((int(words[token % 1024 // 256]) >> 1) + 0.5) / 2**31
    found = noise(seed, [request], [position], 3000)[0, token].item()
    assert found == pytest.approx(-math.log(-math.log(u)), rel=1e-12)


def test_the_noise_is_gumbels_and_independent():
    grid = [(row, position) for row in range(20) for position in range(20)]
    drawn = noise(11, *zip(*grid, strict=True), 500)
    assert stats.kstest(drawn.flatten().numpy(), "gumbel_r").pvalue > distributions.SIGNIFICANCE
    correlation = torch.corrcoef(drawn)[~torch.eye(len(grid), dtype=torch.bool)]
    assert correlation.abs().max() < 6 / 500**0.5
    assert torch.equal(noise(11, [3], [7], 500)[0], drawn[3 * 20 + 7])
    assert not torch.equal(noise(12, [3], [7], 500), noise(11, [3], [7], 500))


def test_the_argmax_is_a_sample():
    probs = torch.tensor([0.5, 0.0, 0.02, 0.18, 0.3])
    count = 20_000
    requests, positions = torch.zeros(count).long(), torch.arange(count)
    drawn = add_gumbel_noise(probs.log().expand(count, -1), 5, requests, positions).argmax(-1)
    counts = drawn.bincount(minlength=5)
    assert counts[1] == 0
    live = probs > 0
    expected = (probs[live].double() / probs[live].double().sum() * count).numpy()
    assert stats.chisquare(counts[live].numpy(), expected).pvalue > distributions.SIGNIFICANCE


def test_masked_logits_stay_masked():
    logits = torch.tensor([[-torch.inf, torch.nan, 0.0]])
    noisy = add_gumbel_noise(logits, 1, torch.tensor([0]), torch.tensor([0]))
    assert noisy.dtype == torch.float32
    assert noisy[0, 0] == -torch.inf
    assert noisy[0, 1].isnan()
    assert noisy[0, 2].isfinite()
