"""Recorded calls run again on changed memory, and never outside of it."""

import gc
import threading
import weakref

import pytest
import torch

from specattn import _cpu
from tests import HANGS
from tests.cpu import calls
from tests.cpu.conftest import at_once, each
from tests.cpu.tensors import normal

BATCH, ROWS, HIDDEN, VOCABULARY, CAPACITY = 2, 8, 256, 50, 600
Q_HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
EPS = 1e-5


class Layer:
    """The first half of a decode layer, on memory of its own; every part of it is one call."""

    def __init__(self, seed=0):
        heads = Q_HEADS + 2 * KV_HEADS
        widths = [n * HEAD_DIM for n in (Q_HEADS, KV_HEADS, KV_HEADS)]
        shapes = [(VOCABULARY, HIDDEN), (HIDDEN,), *[(n, HIDDEN) for n in widths]]
        self.table, self.norm, *self.weights = normal(seed, *shapes, dtype=torch.float32)
        cache = (BATCH, CAPACITY, KV_HEADS, HEAD_DIM)
        self.k_cache, self.v_cache = normal(seed, cache, cache, dtype=torch.float32)
        angles = torch.outer(torch.arange(float(CAPACITY)), 10 ** -torch.linspace(0, 3, 32))
        self.cos, self.sin = angles.cos(), angles.sin()
        self.tokens = torch.zeros(BATCH, ROWS, dtype=torch.int64)
        self.seqlens = torch.zeros(BATCH, dtype=torch.int32)
        self.x = calls.poisoned(BATCH * ROWS, HIDDEN)
        self.heads = calls.poisoned(BATCH * ROWS, heads * HEAD_DIM)
        self.out = calls.poisoned(BATCH, ROWS, Q_HEADS, HEAD_DIM)
        self.lse = calls.poisoned(BATCH, ROWS, Q_HEADS)
        self.change(seed)

    def change(self, seed):
        """Take other tokens and lengths, as the next pass of a decoder does."""
        generator = torch.Generator().manual_seed(seed)
        self.tokens.copy_(torch.randint(VOCABULARY, self.tokens.shape, generator=generator))
        self.seqlens.copy_(torch.randint(CAPACITY - ROWS, (BATCH,), generator=generator))

    def run(self, threads=1):
        heads = self.heads.view(BATCH, ROWS, -1, HEAD_DIM)
        caches = self.k_cache, self.v_cache
        angles = self.cos, self.sin, self.seqlens
        _cpu.embed(self.tokens, self.table, self.x, threads)
        _cpu.rms_norm(self.x, self.norm, EPS, self.x, threads)
        _cpu.linear_parts(self.x, self.weights, [None] * 3, None, None, self.heads, threads)
        _cpu.rotate_heads(
            heads, Q_HEADS, None, None, EPS, *angles, None, *caches, *[None] * 3, threads
        )
        tree = None, None, None, None, None, None
        _cpu.hybrid_tree_attention(
            *(heads[:, :, :Q_HEADS], *caches, self.seqlens, *tree, HEAD_DIM**-0.5, 0.0),
            *(None, None, None, None, None, self.out, self.lse, threads),
        )

    def results(self):
        return [self.x, self.heads, self.k_cache, self.v_cache, self.out, self.lse]

    def poison(self):
        for result in (self.x, self.heads, self.out, self.lse):
            result.fill_(torch.nan)


def record(layer, threads=1):
    graph = _cpu.Graph()
    with graph:
        layer.run(threads)
    return graph


def expected(*seeds, made=0):
    """Return what direct calls make in passes over these tokens."""
    layer = Layer(made)
    for seed in (made, *seeds):
        layer.change(seed)
        layer.run()
    return layer.results()


def same_bits(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_replay_on_changed_memory(isa):
    layer = Layer()
    graph = record(layer)
    assert len(graph) == 5
    assert same_bits(layer.results(), expected())
    for seeds in ((1,), (1, 2)):
        layer.change(seeds[-1])
        layer.poison()
        graph.replay(1)
        assert same_bits(layer.results(), expected(*seeds))
    assert not same_bits(expected(1), expected(2))


def test_threads_do_not_change_bits(isa):
    layer = Layer()
    graph = record(layer, threads=2)
    for threads in (1, 2, 2, 1):
        layer.change(1)
        layer.poison()
        graph.replay(threads)
        assert same_bits(layer.results(), expected(1))


def test_weights_are_read_again(isa):
    layer, other = Layer(0), Layer(1)
    graph = record(layer)
    other.run()
    for to, by in zip(
        [layer.table, layer.norm, *layer.weights, layer.k_cache, layer.v_cache],
        [other.table, other.norm, *other.weights, *Layer(1).results()[2:4]],
        strict=True,
    ):
        to.copy_(by)
    layer.change(1)
    graph.replay(1)
    assert same_bits(layer.results(), other.results())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seqlens", CAPACITY - ROWS + 1, "prefix"),
        ("seqlens", -1, "prefix"),
        ("seqlens", 2**31 - 1, "prefix"),
        ("tokens", VOCABULARY, "tokens"),
        ("tokens", -1, "tokens"),
    ],
)
def test_what_became_invalid_is_an_error(isa, name, value, message):
    layer = Layer()
    graph = record(layer)
    layer.change(1)
    layer.poison()
    caches = layer.k_cache.clone(), layer.v_cache.clone()
    getattr(layer, name).view(-1)[-1] = value
    with pytest.raises(IndexError, match=message):
        graph.replay(1)
    assert layer.out.isnan().all()
    assert same_bits((layer.k_cache, layer.v_cache), caches)
    layer.change(1)
    graph.replay(1)
    assert same_bits(layer.results(), expected(1))


def test_attention_beyond_the_cache_is_an_error(isa):
    q, k, v = normal(0, (1, 2, 4, 16), (1, 30, 2, 16), (1, 30, 2, 16), dtype=torch.float32)
    lengths = torch.tensor([20], dtype=torch.int32)
    graph = _cpu.Graph()
    with graph:
        calls.hybrid_tree_attention(q, k_cache=k, v_cache=v, cache_seqlens=lengths)
    for length in (29, -1, 10**6):
        lengths[0] = length
        with pytest.raises(IndexError, match="cache_seqlens"):
            graph.replay(2)


def test_one_graph_at_a_time(isa):
    first, second = _cpu.Graph(), _cpu.Graph()
    with pytest.raises(ValueError, match="records another graph already"), first, second:
        pytest.fail("two graphs record")
    with pytest.raises(ValueError, match="records another graph already"), first, first:
        pytest.fail("a graph records twice")
    assert len(first) == len(second) == 0
    assert len(record(Layer())) == 5


def test_calls_outside_are_not_recorded(isa):
    layer = Layer()
    graph = record(layer)
    layer.run()
    graph.replay(1)
    other = _cpu.Graph()
    with other:
        graph.replay(1)
    assert (len(graph), len(other)) == (5, 0)
    other.replay(1)  # of nothing


def test_an_exception_leaves_the_thread_free(isa):
    graph = _cpu.Graph()
    layer = Layer()

    def run_and_fail():
        layer.run()
        raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"), graph:
        run_and_fail()
    assert len(graph) == 5
    failed = _cpu.Graph()
    layer.tokens[0, 0] = -1
    with pytest.raises(IndexError, match="tokens"), failed:
        layer.run()
    assert len(failed) == 0
    assert len(record(Layer())) == 5


def test_threads_record_apart(isa):
    layers, graphs, failures = [Layer(0), Layer(1)], [_cpu.Graph(), _cpu.Graph()], []
    together = threading.Barrier(2, timeout=HANGS)

    def work(i):
        try:
            with graphs[i]:
                together.wait()  # both record now
                for _ in range(1 + i):
                    layers[i].run()
                together.wait()
        except Exception as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    assert [len(graph) for graph in graphs] == [5, 10]
    for i in range(2):
        layers[i].change(2)
        layers[i].poison()
        graphs[i].replay(1)
        assert same_bits(layers[i].results(), expected(2, made=i))


@at_once
def test_a_graph_keeps_its_tensors(isa):
    """On every code path; collecting garbage takes longest."""
    made = []
    for one in each(isa):
        layer = Layer()
        graph = record(layer)
        layer.change(1)
        kept = (*layer.weights, layer.table, layer.norm, layer.cos, layer.tokens)
        made.append((one, graph, layer.results(), [weakref.ref(tensor) for tensor in kept]))
        layer.weights.clear()  # the list that the call was given
        del kept
    del layer, graph
    gc.collect()
    gone = []
    while made:
        one, graph, results, refs = made.pop()
        _cpu.use_isa(one)
        assert all(ref() is not None for ref in refs)
        graph.replay(1)
        assert same_bits(results, expected(1))
        gone += refs
    del graph
    gc.collect()
    assert all(ref() is None for ref in gone)
