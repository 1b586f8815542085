"""The cache against lists of tokens, one per request."""

import pytest
import torch

from specattn.kv_cache import KVCache, row_bytes
from tests.cases import random_parents

LAYERS, HEADS, WIDTH = 2, 2, 8


def make(batch=3, capacity=20):
    cache = KVCache(LAYERS, batch, capacity, HEADS, WIDTH)
    cache.storage.fill_(torch.nan)
    return cache


def append(cache, tokens):
    """Write rows whose every number says which token of which layer it is."""
    layers = torch.arange(LAYERS)
    slots = cache.slots(tokens.shape[1])
    for layer in layers:
        k = (tokens * 10.0 + layer)[..., None, None].expand(*tokens.shape, HEADS, WIDTH)
        cache.write(int(layer), k, -k, slots)


def stored(cache):
    """Return the tokens that every layer's keys and values agree on, one list per request."""
    rows = []
    for request, length in enumerate(cache.seqlens.tolist()):
        held = cache.storage[:, :, request, :length]
        said = {
            tuple(((sign * held[layer, side] - layer) / 10)[:, head, at].tolist())
            for layer in range(LAYERS)
            for side, sign in enumerate((1, -1))
            for head in range(HEADS)
            for at in range(WIDTH)
        }
        assert len(said) == 1
        rows.append([int(token) for token in said.pop()])
    return rows


def path_to(parents, node):
    path = []
    while node > 0:
        path.insert(0, node)
        node = parents[node]
    return path


def test_slots_behind_an_offset_of_each_request():
    cache = make()
    cache.seqlens = torch.tensor([4, 0, 7], dtype=torch.int32)
    _, positions = cache.slots(2, torch.tensor([1, 0, 3], dtype=torch.int32))
    assert positions.tolist() == [[5, 6], [0, 1], [10, 11]]
    assert positions.dtype == torch.int64
    assert cache.slots(2, 3)[1].tolist() == [[7, 8], [3, 4], [10, 11]]


def test_commit_keeps_one_path_of_every_request():
    cache, text = make(), [[], [], []]
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        size = 6
        tokens = torch.randint(1, 1000, (3, size), generator=generator)
        append(cache, tokens)
        parents = random_parents(size, generator)
        ends = torch.randint(0, size, (3,), generator=generator).tolist()
        paths = [path_to(parents, end) for end in ends]
        nodes = torch.full((3, size - 1), -1)
        for request, path in enumerate(paths):
            nodes[request, : len(path)] = torch.tensor(path, dtype=torch.int64)
            text[request] += tokens[request, [0, *path]].tolist()
        cache.commit(nodes, torch.tensor([len(path) for path in paths]))
        assert stored(cache) == text
    assert len({len(row) for row in text}) > 1, "the case is meant to be ragged"


def test_a_chain_is_committed_in_place():
    cache = make()
    tokens = torch.arange(1, 13).view(3, 4)
    append(cache, tokens)
    before = cache.storage.clone()
    cache.commit(
        torch.tensor([[1, 2, -1], [-1, -1, -1], [1, 2, 3]]), torch.tensor([2, 0, 3]), in_place=True
    )
    torch.testing.assert_close(cache.storage, before, equal_nan=True, rtol=0, atol=0)
    assert stored(cache) == [[1, 2, 3], [5], [9, 10, 11, 12]]


def test_a_root_alone_is_committed():
    cache = make()
    append(cache, torch.tensor([[1], [2], [3]]))
    cache.commit(torch.empty(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert stored(cache) == [[1], [2], [3]]


@pytest.mark.parametrize("finished", [(1, 0, 0, 0), (0, 1, 0, 1), (1, 1, 1, 0), (0, 0, 0, 1)])
def test_retiring_keeps_the_others_whole(finished):
    cache = make(batch=4)
    append(cache, torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]))
    cache.commit(torch.tensor([[1], [-1], [1], [1]]), torch.tensor([1, 0, 1, 1]), in_place=True)
    text = stored(cache)
    rows = cache.retire([bool(done) for done in finished])
    assert sorted(rows) == [row for row, done in enumerate(finished) if not done]
    assert stored(cache) == [text[row] for row in rows]
    assert cache.batch_size == 4 - sum(finished)


def test_retired_requests_are_not_written_again():
    cache = make(batch=3)
    append(cache, torch.tensor([[1], [2], [3]]))
    cache.commit(torch.empty(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert cache.retire([True, False, True]) == [1]
    append(cache, torch.tensor([[4, 5, 6]]))
    cache.commit(torch.tensor([[2, -1]]), torch.tensor([1]))
    assert stored(cache) == [[2, 4, 6]]
    assert cache.retire([True]) == []
    assert cache.batch_size == 0


def test_lengths_that_were_read_do_not_change():
    cache = make()
    before = cache.seqlens
    append(cache, torch.tensor([[1], [2], [3]]))
    cache.commit(torch.empty(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert before.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("head_dim", "device", "expected"),
    [(128, "cpu", 132), (128, "cuda", 144), (80, "cuda:1", 96), (60, "cuda", 64)],
)
def test_a_gpu_loads_whole_rows_of_8_bits(head_dim, device, expected):
    assert row_bytes(head_dim, device) == expected


def test_writing_beyond_the_capacity_is_an_error():
    cache = make(capacity=3)
    with pytest.raises(IndexError):
        append(cache, torch.ones(3, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("shape", "message"),
    [((2, 0, 8, 2, 8), "batch"), ((2, 1, 0, 2, 8), "capacity"), ((2, 1, 8, 2, -1), "head_dim")],
)
def test_sizes_must_be_positive(shape, message):
    with pytest.raises(ValueError, match=message):
        KVCache(*shape)
