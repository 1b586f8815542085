"""Graphs where a GPU's memory is full, and on several GPUs: by torch's rules, without a GPU."""

import gc
import warnings
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from specattn.blocks import TORCH, captured, programs
from specattn.blocks.programs import CudaGraph, _Captured

CUDA = [torch.device("cuda", index) for index in range(2)]


class Cards:
    """What `torch.cuda` has for captures; it notes on which GPU what is captured.

    As there, a pool lives as long as a graph that was captured in it; an empty one is refused.
    """

    def __init__(self):
        self.current, self.stream_now = 0, None
        self.pools, self.graphs = {}, 0
        self.default_stream = None
        self.capturing = None

    @contextmanager
    def device(self, device):
        before, self.current = self.current, torch.device(device).index
        yield
        self.current = before

    def current_device(self):
        return self.current

    def new_stream(self, index=None):
        device = self.current if index is None else index
        return SimpleNamespace(device=device, wait_stream=lambda other: None)

    def current_stream(self):
        return self.stream_now or self.new_stream()

    @contextmanager
    def stream(self, stream):
        before = self.stream_now, self.current
        self.stream_now, self.current = stream, stream.device
        yield
        self.stream_now, self.current = before

    def pool(self):
        return object()

    def new_graph(self):
        return Captured()

    @contextmanager
    def graph(self, graph, pool, stream=None):
        if stream is None:
            self.default_stream = stream = self.default_stream or self.new_stream()
        assert self.pools.setdefault(pool, None) is None or len(self.pools[pool]), "use_count > 0"
        self.pools[pool] = self.pools[pool] or weakref.WeakSet()
        self.pools[pool].add(graph)
        with self.stream(stream):
            self.capturing = graph
            graph.device = stream.device
            try:
                yield
            finally:
                self.capturing = None


class Captured:
    """A graph: notes how often it was launched."""

    replays = 0

    def replay(self):
        """Launch it."""
        self.replays += 1


@pytest.fixture
def cards(monkeypatch):
    """Return GPUs that `torch.cuda` stands for."""
    found = Cards()
    names = {"device": found.device, "current_device": found.current_device}
    names |= {"Stream": found.new_stream, "current_stream": found.current_stream}
    names |= {"stream": found.stream, "graph": found.graph, "CUDAGraph": found.new_graph}
    names |= {"graph_pool_handle": found.pool}
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    programs._capturing.cache_clear()
    yield found
    programs._capturing.cache_clear()


class OnCard(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = None


def on_card(index):
    kind = type("OnCard", (OnCard,), {"device": CUDA[index]})
    return torch.ones(2).as_subclass(kind)


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1), (1, 1)], ids=str)
def test_a_graph_is_captured_on_the_gpu_of_its_tensors(order, cards):
    """Whichever is the current one, and whichever was captured on first."""
    ran = []

    def program(ops, x):
        ran.append((cards.capturing is not None, cards.current_stream().device))
        return x

    for index in order:
        graph = CudaGraph(cards.pool())
        _Captured(graph, TORCH).record(program, {"x": on_card(index)})
        assert ran == [(False, index), (True, index)]
        assert (graph.graph.device, graph.graph.replays) == (index, 1)
        assert cards.current == 0
        ran.clear()


class Memory:
    """A GPU that is full where `most` programs are kept beside a new one."""

    def __init__(self, most, while_capturing, cards):
        self.most, self.while_capturing, self.cards = most, while_capturing, cards

    def __call__(self, ops, x):
        kept = sum(map(len, filter(None, self.cards.pools.values())))
        kept -= self.cards.capturing is not None
        if kept >= self.most and self.while_capturing == (self.cards.capturing is not None):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x


@pytest.mark.parametrize("while_capturing", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3, 6])
def test_where_memory_is_full_fewer_shapes_are_kept_and_it_is_said_once(
    most, while_capturing, cards
):
    passes, program = captured(), Memory(most, while_capturing, cards)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (*range(1, 20), *range(1, 20)):
            found = passes.run((), program, {"x": torch.full((rows,), float(rows))})
            assert found.tolist() == [rows] * rows
    assert 1 <= len(passes) <= most
    (warning,) = said
    assert "memory is full: fewer shapes of passes" in str(warning.message)


@pytest.mark.parametrize("while_capturing", [False, True])
def test_a_pass_for_which_memory_never_suffices_says_so_and_leaves_others(while_capturing, cards):
    passes, full = captured(), Memory(0, while_capturing, cards)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(torch.OutOfMemoryError):
                passes.run("large", full, {"x": torch.ones(9)})
        gc.collect()
        small = passes.run("small", lambda ops, x: 2 * x, {"x": torch.ones(2)})
        assert small.tolist() == [2, 2]
