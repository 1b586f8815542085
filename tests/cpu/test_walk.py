"""`_cpu.walk_trees` walks as plain Python does, with draws of `add_gumbel_noise`; `keep_paths`."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopKLogitsWarper

import specattn
from tests.walks import report_of, walked

_cpu = pytest.importorskip("specattn._cpu")

FLOATING = [torch.float32, torch.bfloat16, torch.float16]


def _draw(logits, temperature, top_k, seed, request, position):
    """Draw one token as the sampler does it with torch and transformers."""
    scores = logits.float() / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores[None])[0]
    if seed is not None:
        place = torch.tensor([request]), torch.tensor([position])
        scores = specattn.add_gumbel_noise(scores[None], seed, *place)[0]
    best, token = scores.max(-1)
    return int(token) if best > -math.inf else -1


def _drawing(logits, temperatures, top_k, seed, requests, positions):
    def after(b, node, path):
        where = seed, requests[b], positions[b] + len(path)
        return _draw(logits[b, node], temperatures[b], top_k[b], *where)

    return after


def _expected(logits, parents, tokens, temperatures, top_k, seed, requests, positions, depth):
    after = _drawing(logits, temperatures, top_k, seed, requests, positions)
    walks = [
        walked(parents[b % len(parents)], own, partial(after, b))
        for b, own in enumerate(tokens.tolist())
    ]
    return report_of(walks, depth), [emitted for _, emitted in walks]


@st.composite
def trees(draw, size):
    return [-1, *(draw(st.integers(-1 if n > 1 else 0, n - 1)) for n in range(1, size))]


@given(data=st.data())
def test_walks_are_those_of_the_reference(data):
    draw = data.draw
    batch, size, vocabulary = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 70)),
    )
    parents = [draw(trees(size)) for _ in range(draw(st.sampled_from([1, batch])))]
    seed = draw(st.none() | st.integers(0, 2**64 - 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(FLOATING))
    logits = torch.randn(batch, size, vocabulary, generator=generator).to(dtype)
    holes = torch.rand(logits.shape, generator=generator)
    logits[holes < draw(st.sampled_from([0.0, 0.5, 1.0]))] = -math.inf
    logits[holes > draw(st.sampled_from([1.0, 0.99]))] = math.nan
    # Few tokens, so that drafts are often met, and siblings often alike.
    tokens = torch.randint(0, min(3, vocabulary), (batch, size), generator=generator)
    logits[..., :3] += 3
    temperatures = [draw(st.sampled_from([1.0, 0.7, 1.3])) for _ in range(batch)]
    top_k = draw(st.lists(st.integers(0, vocabulary + 1), min_size=batch, max_size=batch))
    if draw(st.booleans()):  # equal ones, of which all that equal the last stay
        logits = (2 * logits).round()
    requests = draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    positions = draw(st.lists(st.integers(0, 10**6), min_size=batch, max_size=batch))
    report = torch.full((batch, 2 + size), 10**9)
    given = parents, tokens, temperatures, top_k, seed, requests, positions
    emitted = _cpu.walk_trees(logits, *given, report, 2)
    expected, expected_tokens = _expected(logits, *given, size)
    assert emitted == expected_tokens
    assert torch.equal(report, expected)
    report.fill_(10**9)
    after = _drawing(logits, *given[2:])
    assert _cpu.walk_trees_drawing(parents, tokens, report, after) == expected_tokens
    assert torch.equal(report, expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("top_k", [0, 1, 50])
def test_large_vocabularies_are_shared_among_threads(threads, top_k):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 151_936, generator=generator)
    given = [[-1, 0]], torch.zeros(1, 2, dtype=torch.int64), [0.9], [top_k], 5, [2], [77]
    report = torch.empty(1, 3, dtype=torch.int64)
    emitted = _cpu.walk_trees(logits, *given, report, threads)
    assert emitted == _expected(logits, *given, 1)[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parents": [[-1, 1]]}, "parents"),
        ({"parents": [[-1]]}, "parents must have as many nodes"),
        ({"parents": []}, "parents must be of one tree"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.int64)}, "tokens must be"),
        ({"temperatures": []}, "as many requests"),
        ({"top_k": []}, "as many requests"),
        ({"report": torch.zeros(1, 2, dtype=torch.int64)}, "report has too few columns"),
        ({"logits": torch.zeros(1, 2, 4, dtype=torch.float64)}, "logits must have"),
    ],
)
def test_errors_name_the_argument(changes, message):
    logits = torch.zeros(1, 2, 4)
    arguments = {
        "logits": logits,
        "parents": [[-1, 0]],
        "tokens": torch.zeros(1, 2, dtype=torch.int64),
        "temperatures": [1.0],
        "top_k": [0],
        "seed": None,
        "requests": [0],
        "positions": [0],
        "report": torch.zeros(1, 3, dtype=torch.int64),
        "threads": 1,
    }
    with pytest.raises((ValueError, IndexError), match=message):
        _cpu.walk_trees(**(arguments | changes))


@given(data=st.data())
def test_rows_of_accepted_nodes_are_kept(data):
    draw = data.draw
    batch, size, width, depth = (draw(st.integers(1, n)) for n in (3, 9, 70, 5))
    most = draw(st.integers(0, depth))
    at, behind = draw(st.integers(0, 4)), draw(st.integers(0, 2))
    dtype = draw(st.sampled_from([*FLOATING, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    wide = torch.randn(batch, size + 1, width + 3, generator=generator).to(dtype)
    rows = wide[:, 1:, :width]
    nodes = torch.randint(-1, size, (batch, depth + 2), generator=generator)[:, 2:]
    kept = torch.zeros(batch, at + 1 + most + behind, width + 1, dtype=dtype)[..., :width]
    expected = kept.clone()
    for b, path in enumerate(nodes.tolist()):
        for step, node in enumerate([0, *path[:most]]):
            expected[b, at + step] = rows[b, max(node, 0)]
    _cpu.keep_paths(rows, nodes, most, kept, at)
    assert torch.equal(kept, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.zeros(4, 3)}, "rows must be"),
        ({"rows": torch.zeros(2, 4, 3)}, "nodes must be"),
        ({"kept": torch.zeros(1, 5, 3, dtype=torch.float64)}, "kept must be"),
        ({"kept": torch.zeros(1, 5, 2)}, "kept must be"),
        ({"nodes": torch.tensor([[1, 4]])}, "nodes: expected values from 0 to 3, got 4"),
        ({"most": 3}, "most: expected values from 0 to 2, got 3"),
        ({"at": 3}, "at: expected values from 0 to 2, got 3"),
        ({"at": -1}, "at: expected values from 0 to 2, got -1"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes, message):
    arguments = {
        "rows": torch.zeros(1, 4, 3),
        "nodes": torch.tensor([[1, 2]]),
        "most": 2,
        "kept": torch.zeros(1, 5, 3),
        "at": 1,
    }
    with pytest.raises((ValueError, IndexError), match=message):
        _cpu.keep_paths(**(arguments | changes))
