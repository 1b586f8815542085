"""Attention over a sharded cache against a dense softmax in float64, and what it costs."""

import math
from types import SimpleNamespace

import pytest
import torch
from specattn.reference._eight_bits import dequantised, dynamic_scale, quantised

import specattn.distributed.group as group
from specattn.distributed import ContextParallel
from specattn.distributed.context import ContextCache
from specattn.kv_cache import KVCache, NewHeads
from specattn.tree import Tree

HQ, HK, D, BLOCK = 4, 2, 16, 4
LENGTHS = (37, 5)
PARENTS = [-1, 0, 0, 1, 2]
STORED = (None, torch.int8, torch.float8_e4m3fn)


def rows_of(cache, count, mask=None, offset=0):
    return SimpleNamespace(
        slots=cache.slots(count, offset),
        prefix=cache.seqlens + offset,
        tree_mask=mask,
        max_seqlen=cache.capacity,
    )


def inputs(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(count)
    heads = (HQ, HK, HK)
    return [torch.randn(2, count, h, D, generator=generator, dtype=dtype) for h in heads]


def dense(q, k, v, visible, sinks=None):
    """Attend by the definition; k and v [n, Hk, D], q [T, Hq, D], visible [T, n]."""
    k, v = (x.repeat_interleave(HQ // HK, 1) for x in (k, v))
    logits = torch.einsum("thd,nhd->thn", q, k) / math.sqrt(D)
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[None, :, None].expand(len(q), -1, 1)], -1)
    weights = logits.softmax(-1)[..., : len(k)]
    return torch.einsum("thn,nhd->thd", weights, v)


def poisoned(stored):
    """Return a cache in which what nobody has written must not matter: it is NaN."""
    ranks = ContextParallel(block_size=BLOCK)
    cache = ContextCache(ranks, [None, 7], 2, 64, HK, D, dtype=torch.float64, stored=stored)
    cache.storage.fill_(torch.nan if stored is None else 255)
    return cache


def as_stored(x, stored):
    """Return keys or values as a cache gives them back."""
    if stored is None:
        return x
    scale = dynamic_scale(x, stored)
    return dequantised(quantised(x, scale, stored), scale, x.dtype)


def attend_everywhere(stored):
    """Return the largest errors of a chunk, a tree, a selection and scores on this rank."""
    cache = poisoned(stored)
    sinks = torch.randn(HQ, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = inputs(max(LENGTHS))
    out, _ = cache.attend(NewHeads(0, q, k, v, rows_of(cache, len(k[0]))), sinks=sinks)
    k, v = as_stored(k, stored), as_stored(v, stored)
    causal = torch.ones(len(k[0]), len(k[0]), dtype=torch.bool).tril()
    errors = {"chunk": max(error(out[b], dense(q[b], k[b], v[b], causal, sinks)) for b in (0, 1))}
    cache.seqlens = torch.tensor(LENGTHS, dtype=torch.int32)

    tree = Tree(PARENTS)
    new_q, new_k, new_v = inputs(tree.size)
    rows = rows_of(cache, tree.size, tree.packed_mask)
    collected = torch.empty(2, cache.width, dtype=torch.float64)
    options = {"collect": "scores", "collect_rows": (0, -1), "per_head": False}
    out, _, _ = cache.attend_and_collect(
        NewHeads(0, new_q, new_k, new_v, rows), collected=collected, **options
    )
    new_k, new_v = as_stored(new_k, stored), as_stored(new_v, stored)
    scores, logits = cache.gathered(collected), []
    errors["tree"], errors["scores"] = 0.0, 0.0
    for b, length in enumerate(LENGTHS):
        visible = torch.cat([torch.ones(tree.size, length, dtype=torch.bool), tree.mask], 1)
        keys, values = (torch.cat([x[b, :length], y[b]]) for x, y in ((k, new_k), (v, new_v)))
        expected = dense(new_q[b], keys, values, visible)
        errors["tree"] = max(errors["tree"], error(out[b], expected))
        shared = k[b, :length].repeat_interleave(HQ // HK, 1)
        logits = torch.einsum("thd,nhd->thn", new_q[b, [0, -1]], shared).mean((0, 1)) / D**0.5
        errors["scores"] = max(errors["scores"], error(scores[b, :length], logits))
        assert (scores[b, length:] == -torch.inf).all()

    # Nodes 2 and 4 stay, and node 1 of the second request.
    cache.commit(torch.tensor([[2, 4], [1, -1]]), torch.tensor([2, 1]))
    kept = [[0, 2, 4], [0, 1]]
    texts = [
        [torch.cat([x[b, : LENGTHS[b]], y[b, kept[b]]]) for x, y in ((k, new_k), (v, new_v))]
        for b in (0, 1)
    ]
    chosen = torch.tensor([[0, 3, 9, 36, 37, 39], [1, 2, 6, -1, -1, -1]], dtype=torch.int32)
    counts = torch.tensor([6, 3], dtype=torch.int32)
    last_q, last_k, last_v = inputs(1)
    last = NewHeads(0, last_q, last_k, last_v, rows_of(cache, 1))
    out, _ = cache.attend_selected(last, chosen, counts)
    errors["selected"] = 0.0
    for b, (keys, values) in enumerate(texts):
        at = chosen[b, : counts[b]].long()
        keys, values = torch.cat([keys[at], last_k[b]]), torch.cat([values[at], last_v[b]])
        visible = torch.ones(1, len(keys), dtype=torch.bool)
        errors["selected"] = max(
            errors["selected"], error(out[b], dense(last_q[b], keys, values, visible))
        )

    # The first request ends; the second takes its place.
    assert cache.retire([True, False]) == [1]
    out, _ = cache.attend_committed(0, last_q[1:], cache.seqlens, torch.zeros(1, 1).long())
    keys, values = texts[1]
    visible = torch.ones(1, len(keys), dtype=torch.bool)
    errors["retired"] = error(out[0], dense(last_q[1], keys, values, visible))
    return errors


def attend_split(stored):
    """Return the largest error of this rank's share of ragged rows, for each kind of layer."""
    cache, count = poisoned(stored), sum(LENGTHS)
    share = count // 2 + 1  # the first request's end comes second, and two rows are nobody's
    first = cache.ranks.rank * share
    q, k, v = (torch.cat([x[0], x[1, :5]]) for x in inputs(LENGTHS[0]))
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 2), value=7.0) for x in (q, k, v)]
    own = [x[first : first + share] for x in padded]
    requests = torch.tensor([0] * 37 + [1] * 5)
    positions = torch.cat([torch.arange(37), torch.arange(5)])
    rows = rows_of(cache, count)
    rows.slots, rows.max_seqlen = (requests, positions), max(LENGTHS)
    ragged = {"cu_seqlens_q": torch.tensor([0, 37, 42], dtype=torch.int32), "max_seqlen_q": 37}
    distance = positions[:, None] - positions
    causal, errors = (requests[:, None] == requests) & (distance >= 0), []
    for layer, window in enumerate((None, 7)):
        visible = causal if window is None else causal & (distance < window)
        out = cache.attend_split(NewHeads(layer, *own, rows), first, window=window, **ragged)
        keys, values = as_stored(k, stored), as_stored(v, stored)
        expected = dense(q, keys, values, visible)[first : first + share]
        errors.append(error(out[: len(expected)], expected))
    return max(errors)


def error(found, expected):
    return float((found - expected).abs().max())


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_attention_of_two_ranks_is_that_to_all_keys(two_ranks, stored):
    for errors in two_ranks(attend_everywhere, stored):
        assert errors.keys() == {"chunk", "tree", "scores", "selected", "retired"}
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_ranks_share_the_rows_of_a_chunk(two_ranks, stored):
    assert max(two_ranks(attend_split, stored)) < 1e-12


def count_bytes(rows, dtype):
    """Return what torch is asked to send for one layer's attention of `rows` rows."""
    ranks = ContextParallel(block_size=BLOCK)
    vars(ranks)["shared_memory"] = None
    cache = ContextCache(ranks, [None], 2, 256, HK, D, dtype=dtype)
    sent, collective = [], group._gather

    def counting(out, own, **options):
        sent.append(own.nbytes)
        return collective(out, own, **options)

    group._gather = counting
    try:
        cache.attend(NewHeads(0, *inputs(rows, dtype), rows_of(cache, rows)))
    finally:
        group._gather = collective
    assert ranks.sent_bytes["attention"] == sum(sent) * (ranks.size - 1)
    return sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 100])
def test_one_exchange_per_layer_takes_the_bytes_of_a_state(two_ranks, rows, dtype):
    state = 2 * rows * HQ * (D * dtype.itemsize + 4)
    for sent in two_ranks(count_bytes, rows, dtype):
        assert len(sent) == 1
        assert state <= sent[0] <= 1.02 * state


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.52), (4, 0.27)])
def test_a_rank_keeps_its_share_of_the_cache(monkeypatch, ranks, share):
    capacity = 31_000
    stub = SimpleNamespace(rank=0, size=ranks, block_size=64)
    cache = ContextCache(stub, [None, None], 1, capacity, HK, D)
    tree = Tree.full((4, 8, 8))
    q, k, v = (x[:1] for x in inputs(tree.size, torch.float32))
    alone = lambda _, q, attend: (q[None], q[None, ..., 0].contiguous())  # noqa: E731
    monkeypatch.setattr(ContextCache, "_exchanged", alone)
    cache.attend(NewHeads(0, q, k, v, rows_of(cache, tree.size, tree.packed_mask)))
    held = cache.storage.nbytes + cache._staging.nodes.nbytes
    assert held <= share * KVCache(2, 1, capacity, HK, D).storage.nbytes


def test_a_model_whose_layers_all_slide_has_nothing_to_deal():
    stub = SimpleNamespace(rank=0, size=2, block_size=64)
    with pytest.raises(ValueError, match="all layers slide"):
        ContextCache(stub, [8, 8], 1, 64, HK, D)
