"""Graphs where a GPU's memory is full, and on several GPUs: by torch's rules, without a GPU."""

import gc
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from specattn.blocks import TORCH, captured, cuda_graphs
from specattn.blocks.cuda_graphs import CudaGraph
from specattn.blocks.programs import _Captured

CUDA = [torch.device("cuda", index) for index in range(2)]


class Cards:
    """What `torch.cuda` has for captures; it notes on which GPU what is captured.

    As there, a pool lives as long as a graph that was captured in it; an empty one is refused. A
    capture that was invalidated, as by what asks the device, cannot be ended: then torch 2.11 stays
    in its stream, allocates for it for ever, and makes no random numbers before another has ended.
    """

    def __init__(self):
        self.current, self.threads = 0, threading.local()
        self.pools, self.graphs, self.streams = {}, 0, []
        self.default_stream = None
        self.capturing, self.invalid = None, False
        self.allocating, self.random = [], True
        self.full = None  # raised where a graph is made of what was captured

    @property
    def stream_now(self):
        return getattr(self.threads, "stream", None)

    @stream_now.setter
    def stream_now(self, stream):
        self.threads.stream = stream

    @contextmanager
    def device(self, device):
        before, self.current = self.current, torch.device(device).index
        yield
        self.current = before

    def current_device(self):
        return self.current

    def new_stream(self, index=None):
        device = self.current if index is None else index
        self.streams.append(SimpleNamespace(device=device, waits=[]))
        self.streams[-1].wait_stream = self.streams[-1].waits.append
        return self.streams[-1]

    def current_stream(self):
        self.default_stream = self.default_stream or self.new_stream()
        return self.stream_now or self.default_stream

    @contextmanager
    def stream(self, stream):
        before = self.stream_now, self.current
        self.stream_now, self.current = stream, stream.device
        try:
            yield
        finally:
            self.stream_now, self.current = before

    def pool(self):
        return object()

    def new_graph(self):
        return Captured()

    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        assert capture_error_mode == "thread_local", "any other thread may invalidate it"
        return Capture(self, graph, pool, stream)

    def end_allocating(self, device, pool):
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)

    def ask(self):
        """What waits for the device, in a capture."""
        self.invalid = True
        raise RuntimeError("operation not permitted when stream is capturing")


class Capture:
    """What `torch.cuda.graph` is: leaving it restores the stream only where all went well."""

    def __init__(self, cards, graph, pool, stream):
        assert stream is not None
        self.cards, self.graph, self.pool, self.stream = cards, graph, pool, stream

    def __enter__(self):
        cards, pool = self.cards, self.pool
        assert cards.capturing is None, "one at a time"
        assert not torch.is_inference_mode_enabled(), "its generator's tensors outlive the capture"
        if pool is not None:
            assert cards.pools.setdefault(pool, None) is None or len(cards.pools[pool]), "use_count"
            cards.pools[pool] = cards.pools[pool] or weakref.WeakSet()
            cards.pools[pool].add(self.graph)
        self.before = cards.stream_now, cards.current
        cards.stream_now, cards.current = self.stream, self.stream.device
        self.graph.device = cards.current
        cards.capturing, cards.invalid, cards.random = self.graph, False, False
        cards.allocating.append(pool)

    def __exit__(self, *error):
        cards = self.cards
        cards.capturing = None
        if cards.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        cards.end_allocating(cards.current, self.pool)
        cards.random = True
        if cards.full is not None and cards.full():
            raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
        cards.stream_now, cards.current = self.before


class Captured:
    """A graph: notes how often it was launched."""

    replays = 0

    def replay(self):
        """Launch it."""
        self.replays += 1


@pytest.fixture
def cards(monkeypatch):
    """Return GPUs that `torch.cuda` stands for."""
    found, zeros = Cards(), torch.zeros
    names = {"device": found.device, "current_device": found.current_device}
    names |= {"Stream": found.new_stream, "current_stream": found.current_stream}
    names |= {"stream": found.stream, "graph": found.graph, "CUDAGraph": found.new_graph}
    names |= {"graph_pool_handle": found.pool}
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end_allocating, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **how: zeros(*size, **how))
    cuda_graphs._capturing.cache_clear()
    yield found
    cuda_graphs._capturing.cache_clear()


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


FULL = {
    "torch": torch.OutOfMemoryError("CUDA out of memory"),
    "the driver": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported"),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
}


class Memory:
    """A GPU that is full where `most` programs are kept beside a new one."""

    def __init__(self, most, while_capturing, cards, error=FULL["torch"]):
        self.most, self.while_capturing = most, while_capturing
        self.cards, self.error = cards, error

    def is_full(self):
        kept = sum(map(len, filter(None, self.cards.pools.values())))
        return kept - (self.cards.capturing is not None) >= self.most

    def __call__(self, ops, x):
        if self.is_full() and self.while_capturing == (self.cards.capturing is not None):
            raise type(self.error)(*self.error.args)
        return x


def run_many(passes, program, most):
    """Run passes of many sizes, and see that few are kept and that this is said once."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (*range(1, 20), *range(1, 20)):
            found = passes.run((), program, {"x": torch.full((rows,), float(rows))})
            assert found.tolist() == [rows] * rows
    assert 1 <= len(passes) <= most
    (warning,) = said
    assert "memory is full: fewer shapes of passes" in str(warning.message)


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
@pytest.mark.parametrize("while_capturing", [False, True])
@pytest.mark.parametrize("most", [1, 2, 3, 6])
def test_where_memory_is_full_fewer_shapes_are_kept_and_it_is_said_once(
    most, while_capturing, error, cards
):
    run_many(captured(), Memory(most, while_capturing, cards, error), most)


def test_where_a_graph_itself_finds_no_memory_fewer_are_kept(cards):
    """The driver's own memory for its launches, beside torch's."""
    memory = Memory(3, True, cards)
    cards.full = lambda: sum(map(len, filter(None, cards.pools.values()))) > memory.most
    run_many(captured(), lambda ops, x: x, memory.most)


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


def as_it_was(cards):
    return cards.stream_now is None and cards.allocating == [] and cards.random and gc.isenabled()


@pytest.mark.parametrize("says", ["the program", "nobody"])
def test_a_capture_that_fails_leaves_nothing_behind(says, cards):
    """Neither its stream, nor torch's allocator or generator; and it says what failed."""

    def asks(ops, x):
        if cards.capturing is not None:
            if says == "nobody":  # another thread waited for the whole device
                cards.invalid = True
            else:
                cards.ask()
        return x

    passes = captured()
    for _ in range(2):
        said = "not permitted" if says == "the program" else "previous error during capture"
        with pytest.raises(RuntimeError, match=said):
            passes.run("asks", asks, {"x": torch.ones(2)})
        assert as_it_was(cards)
        assert len(passes) == 0
    assert passes.run("fine", lambda ops, x: x, {"x": torch.ones(2)}).tolist() == [1, 1]


def test_all_graphs_of_a_gpu_are_warmed_up_and_captured_in_one_stream(cards):
    """For each other cuBLAS has a workspace. It waits for what came before."""
    passes, streams = captured(), []

    def program(ops, x):
        streams.append(cards.stream_now)
        return x

    for rows in range(1, 5):
        passes.run((), program, {"x": torch.ones(rows)})
    default, own = cards.streams
    assert streams == [own] * 8
    assert (own.waits, default.waits) == ([default] * 4, [own] * 4)


@torch.inference_mode()
def test_what_is_captured_in_inference_mode_hinders_no_other_capture(cards):
    modes = []

    def program(ops, x):
        modes.append(torch.is_inference_mode_enabled())
        return x

    captured().run((), program, {"x": torch.ones(2)})
    assert modes == [True, True]


def test_memory_that_is_freed_in_a_capture_is_no_other_graph(cards):
    """Destroying one would invalidate it: Python collects cycles before or behind."""

    def program(ops, x):
        assert gc.isenabled() == (cards.capturing is None)
        return x

    captured().run((), program, {"x": torch.ones(2)})
    assert gc.isenabled()
    gc.disable()
    try:
        captured().run((), lambda ops, x: x, {"x": torch.ones(2)})
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_capture_one_after_the_other(cards):
    """All in one stream, where a launch of another would be captured, too."""
    together = threading.Barrier(4, timeout=5)

    def run(number):
        def program(ops, x):
            with pytest.raises(threading.BrokenBarrierError):
                together.wait(0.01)
            together.reset()
            return number * x

        return captured().run((), program, {"x": torch.ones(2)}).tolist()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == [[number] * 2 for number in range(4)]
