"""Drafts from a text's own repetitions: the index against brute force, and what sizes a draft."""

import math
import time
from collections import Counter
from random import Random
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding import generate
from specattn.decoding.drafting.gains import SIZES, Lookups
from specattn.decoding.methods.suffix import Lookup, Suffix, SuffixDrafter
from tests.decoding.models import prompts, tiny_model
from tests.decoding.pacing import with_costs

_cpu = pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")

TEXTS = st.integers(1, 4).flatmap(lambda kinds: st.lists(st.integers(0, kinds), max_size=60))


def drafter(text, successors=None):
    built = _cpu.SuffixDrafter()
    built.extend(text, successors)
    return built


def rank(successors, logits, tokens, nodes):
    """Note what was ranked best; no text is read on."""
    texts = torch.zeros(0, 0, dtype=torch.int64)
    _cpu.learn([], texts, [], [], [], successors, logits, tokens, nodes)


def followers(text, context):
    """Return how often each token follows a context in a text."""
    n = len(context)
    ends = (i + n for i in range(len(text) - n) if text[i : i + n] == context)
    return Counter(text[end] for end in ends)


def longest_match(text):
    """Return the length of the longest suffix of a text that occurs in it before."""
    lengths = range(len(text) - 1, 0, -1)
    return next((n for n in lengths if followers(text, text[len(text) - n :])), 0)


@given(text=TEXTS)
def test_the_match_is_the_longest_there_is(text):
    built = _cpu.SuffixDrafter()
    for length, token in enumerate(text, 1):
        built.extend([token])
        assert len(built) == length
        assert built.match == longest_match(text[:length])


@given(text=TEXTS, nodes=st.integers(1, 40), depth=st.integers(1, 6))
def test_a_draft_is_a_tree_of_what_occurred(text, nodes, depth):
    parents, tokens, probabilities = drafter(text).draft(nodes, depth)
    assert len(parents) == len(tokens) == len(probabilities) <= nodes
    assert probabilities == sorted(probabilities, reverse=True)
    assert all(0 < p <= 1 + 1e-6 for p in probabilities)
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens), "siblings share a token"
    paths = [[]]  # of the root, then of every node
    for number, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        assert parent < number
        paths.append([*paths[parent + 1], token])
        assert len(paths[-1]) <= depth
        ends = range(1, longest_match(text) + len(paths[-1]))
        context = text + paths[-1][:-1]
        assert any(followers(text, context[-n:])[token] for n in ends), "it never came before"
    for node in range(-1, len(parents)):
        below = sum(p for at, p in zip(parents, probabilities, strict=True) if at == node)
        assert below <= (probabilities[node] if node >= 0 else 1) * (1 + 1e-5)


@given(text=TEXTS.filter(lambda text: longest_match(text) > 0))
def test_all_continuations_of_the_longest_match_are_drafted_first_and_then_those_of_shorter(text):
    counts = followers(text, text[-longest_match(text) :])
    shorter = followers(text, text[-1:])
    _, tokens, _ = drafter(text).draft(20, 1)
    assert set(counts) <= set(tokens) <= set(shorter)


def test_counts_decide_between_continuations():
    text = [7, 8, 1, 7, 8, 2, 7, 8, 2, 7, 8, 2, 9, 7, 8]
    _, tokens, probabilities = drafter(text).draft(2, 1)
    assert tokens == [2, 1]
    assert probabilities[0] > 2 * probabilities[1]


def test_a_match_that_was_right_before_is_drafted_deeper():
    """What is learned from the text: in the one every match goes on, in the other few do."""
    faithful = list(range(40)) * 6
    generator = torch.Generator().manual_seed(1)
    noisy = torch.randint(12, (240,), generator=generator).tolist()
    sums = [sum(drafter(text).draft(20, 20)[2]) for text in (faithful, noisy)]
    assert sums[0] > 3 * sums[1]
    assert sums[0] > 15


def test_what_has_no_match_comes_from_the_table():
    successors = torch.full((10, 2), -1, dtype=torch.int32)
    successors[3] = torch.tensor([5, 6])
    successors[5] = torch.tensor([4, -1])
    parents, tokens, _ = drafter([1, 2, 3], successors).draft(8, 3, 0.0, successors)
    paths = {(parents[i], token) for i, token in enumerate(tokens)}
    assert {(-1, 5), (-1, 6), (tokens.index(5), 4)} <= paths
    assert drafter([1, 2, 3]).draft(8, 3) == ([], [], [])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(3, 2), "successors must be .* int32"),
        (torch.zeros(3, dtype=torch.int32), "successors must be"),
    ],
)
def test_a_table_of_another_kind_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        drafter([1]).draft(1, 1, 0.0, table)


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 200)),
    k=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_best_successors_of_what_stays_are_kept(seed, shape, k, dtype):
    """Against a sort that keeps the first of equals; bfloat16 has many of them."""
    batch, size, vocabulary = shape
    k = min(k, vocabulary)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator).to(dtype)
    tokens = torch.randint(vocabulary, (batch, size), generator=generator)
    depth = int(torch.randint(0, size, (), generator=generator))
    nodes = torch.arange(1, depth + 1).repeat(batch, 1)
    counts = torch.randint(0, depth + 1, (batch,), generator=generator)
    nodes[torch.arange(depth) >= counts[:, None]] = -1
    table = torch.full((vocabulary, k), -1, dtype=torch.int32)
    wanted = table.clone()
    rank(table, logits, tokens, nodes)
    for request, count in enumerate(counts.tolist()):
        for node in range(count + 1):
            order = logits[request, node].sort(descending=True, stable=True).indices
            wanted[tokens[request, node]] = order[:k].int()
    assert torch.equal(table, wanted)


def test_logits_that_are_none_rank_nothing():
    logits = torch.tensor([[[torch.nan, 2.0, torch.nan, -torch.inf, 3.0]]])
    table = torch.zeros(5, 4, dtype=torch.int32)
    rank(table, logits, torch.tensor([[1]]), torch.empty(1, 0, dtype=torch.int64))
    assert table[1].tolist() == [4, 1, 3, -1]


@pytest.mark.parametrize(
    ("tokens", "nodes", "message"),
    [
        ([[5, 0]], [[-1]], "tokens: expected values from 0 to 4, got 5"),
        ([[0, 0]], [[2]], "nodes: expected values from -1 to 1, got 2"),
        ([[0]], [[-1]], "tokens must be"),
    ],
)
def test_successors_of_what_is_not_there_are_refused(tokens, nodes, message):
    table = torch.zeros(5, 4, dtype=torch.int32)
    with pytest.raises((ValueError, IndexError), match=message):
        rank(table, torch.zeros(1, 2, 5), torch.tensor(tokens), torch.tensor(nodes))


@pytest.mark.slow
def test_a_million_tokens():
    generator = torch.Generator().manual_seed(1)
    words = (torch.rand(1_000_000, generator=generator) ** -0.8).int().clamp(max=50_000).tolist()
    for begin in range(50_000, 1_000_000, 1000):  # a tenth is copied from before
        words[begin : begin + 100] = words[begin - 40_000 : begin - 39_900]
    begun = time.perf_counter()
    built = drafter(words)
    seconds = time.perf_counter() - begun
    print(f"{seconds:.2f} us a token, {built.bytes / 1e6:.0f} MB")
    assert built.bytes < 400e6
    assert built.match == drafter(words[-200_000:]).match


def best_size(seconds, probabilities):
    """Return the rows with the most tokens per second, of equals the fewest: by trying all."""
    longest = max(map(len, probabilities)) + 1

    def rate(rows):
        return sum(1 + sum(one[: rows - 1]) for one in probabilities) / seconds[rows]

    least = next((n for n in seconds if n >= longest), math.inf)  # that whole trees fit into
    return max((n for n in seconds if n <= least), key=lambda n: (rate(n), -n))


@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    depth=st.integers(0, 6),
    more=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=len(SIZES)),
)
def test_the_best_trees_are_the_best_of_whole_ones(texts, depth, more):
    seconds, total = {}, 0.0
    for rows, step in zip(SIZES, [1.0, *more], strict=False):
        seconds[rows] = total = total + step
    whole = [drafter(text).draft(max(seconds) - 1, depth) for text in texts]
    expected = best_size(seconds, [probabilities for *_, probabilities in whole])
    drafters = [drafter(text) for text in texts]
    times = _cpu.PassTimes(list(seconds), list(seconds.values()))
    room = torch.full((len(texts) * max(seconds),), -7)
    rows, shapes, gains = _cpu.best_trees(drafters, [depth] * len(texts), times, room)
    assert rows == expected
    drafted = room[: len(texts) * rows].view(len(texts), rows).tolist()
    assert room[len(texts) * rows :].eq(-7).all()
    for text, tree, shape, gain, row in zip(texts, whole, shapes, gains, drafted, strict=True):
        parents, tokens, probabilities = (part[: rows - 1] for part in tree)
        padding = [-1] * (rows - 1 - len(tokens))
        assert shape == (-1, *(parent + 1 for parent in parents), *padding)
        assert row == [text[-1] if text else -1, *tokens, *[0] * (rows - 1 - len(tokens))]
        assert gain == pytest.approx(sum(probabilities))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafters": []}, "depths must be as many"),
        ({"depths": [1, 2]}, "depths must be as many"),
        ({"drafted": torch.empty(2, dtype=torch.int64)}, "drafted is too small"),
        ({"drafted": torch.empty(9)}, "drafted must be .* of int64"),
    ],
)
def test_best_trees_says_what_it_expects(changes, message):
    arguments = {"drafters": [drafter([1, 2])], "depths": [1], "drafted": torch.zeros(3).long()}
    times = _cpu.PassTimes([1, 3], [1.0, 2.0])
    _cpu.best_trees(**arguments, times=times)
    with pytest.raises(ValueError, match=message):
        _cpu.best_trees(**arguments | changes, times=times)


@pytest.mark.parametrize(
    ("rows", "seconds"), [([], []), ([0, 1], [1.0, 2.0]), ([1, 1], [1.0, 2.0]), ([1, 3], [1.0])]
)
def test_times_say_what_they_expect(rows, seconds):
    with pytest.raises(ValueError, match="rows must ascend from 1 or more, with as many seconds"):
        _cpu.PassTimes(rows, seconds)


def test_texts_are_read_on_where_they_lie():
    texts, padding, ends = torch.randint(0, 4, (3, 40)), [0, 5, 2], [40, 31, 2]
    drafters = [drafter(texts[row, padding[row] : 12].tolist()) for row in (0, 1)]
    _cpu.learn(drafters[::-1], texts, [1, 0], padding, ends, None)
    for row, one in enumerate(drafters):
        text = texts[row, padding[row] : ends[row]].tolist()
        same = drafter(text[: 12 - padding[row]])
        same.extend(text[12 - padding[row] :], generated=True)
        assert len(one) == len(text)
        assert one.draft(20, 4) == same.draft(20, 4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": [0]}, ValueError, "rows must be as many as drafters"),
        ({"ends": [4]}, ValueError, "begins and ends as texts"),
        ({"rows": [0, 2]}, IndexError, "^rows: expected values from 0 to 1, got 2"),
        ({"ends": [4, 7]}, IndexError, "^ends: expected values from 2 to 6, got 7"),
        ({"ends": [4, 1]}, IndexError, "^ends: expected values from 2 to 6, got 1"),
        ({"texts": torch.zeros(2, 6)}, ValueError, "texts must be .* of int64"),
    ],
)
def test_what_is_read_on_is_checked(changes, error, message):
    texts = torch.zeros(2, 6, dtype=torch.int64)
    arguments = {"texts": texts, "rows": [0, 1], "begins": [0, 0], "ends": [4, 4]}
    drafters = [drafter([1, 2]), drafter([1, 2])]
    with pytest.raises(error, match=message):
        _cpu.learn(drafters, **arguments | changes, successors=None)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_generated_text_corrects_what_the_prompt_promised(share):
    """The prompt repeats itself always, what follows only sometimes."""
    random, built = Random(1), drafter([1, 2, 3, 4] * 100)
    promised, came = [], []
    for _ in range(600):
        _, (expected,), (chance,) = built.draft(1, 1)
        promised.append(chance)
        came.append(random.random() < share)
        built.extend([expected if came[-1] else random.randint(5, 9999)], generated=True)
        if not came[-1]:
            built.extend([1, 2, 3, 4] * 4)  # given, and so no witness
    assert promised[0] > 0.99
    assert fmean(promised[-300:]) == pytest.approx(fmean(came[-300:]), abs=0.1)


def test_lookups_that_others_drafts_confirm_are_trusted_again():
    """Whoever drafted: else one wrong lookup would be the last for long."""
    drafter, lookups = object.__new__(SuffixDrafter), Lookups(at_once=4.0)
    lookups.learn(24.0, 0)
    shape, tokens = (-1, 0, 1, 2, 3), torch.tensor([[7, 1, 2, 3, 4]])
    drafter.sequences = SimpleNamespace(active=[0], emitted=[[1, 2, 3]])
    drafter.looked_up = Lookup(5, (shape,), tokens, (3.6,))
    for factor in (7 / 11, 10 / 14):  # three tokens came, all true: the fourth is not known
        drafter._judge(lookups)
        assert lookups.factor == pytest.approx(factor)
    drafter.looked_up = Lookup(5, (shape,), tokens + 1, (3.6,))  # none is true
    drafter._judge(lookups)
    assert lookups.factor == pytest.approx(10 / 17.6)


def test_nothing_is_drafted_where_nothing_pays(monkeypatch):
    """Every row more doubles the costs."""
    with_costs(monkeypatch, lambda rows: 1.0 if rows == 1 else 2.0**rows)
    model = tiny_model("qwen3")
    text = prompts([40], vocabulary=model.config.vocab_size)
    found = generate(model, text, Suffix(), max_new_tokens=30, temperature=0)
    assert found.statistics.requests[0].drafted == 0
    plain = generate(model, text, "plain", max_new_tokens=30, temperature=0)
    assert found.new_tokens == plain.new_tokens


@pytest.mark.parametrize("option", ["nodes", "depth", "k"])
def test_options_out_of_range(option):
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        Suffix(**{option: 0})
