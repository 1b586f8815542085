"""What captured passes hold: results of all sizes share memory, and are counted."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import specattn
from specattn.blocks import Projection, captured, graph_bytes
from specattn.blocks.ops import _own_bits
from specattn.blocks.results import Results, note_pool
from specattn.decoding.engine.target import Target
from specattn.decoding.passes.padding import ROWS
from specattn.tree import Tree
from tests.decoding.fake_gpu import FakeGPU
from tests.decoding.models import prompts, tiny_model

if specattn.backends()["triton"] != "available":
    pytest.skip("Triton is not available here", allow_module_level=True)

from specattn.blocks.fused import Fused
from tests.decoding.captured import FEW, captured_runner, two_targets

V, H = 40, 16


class Runs:
    """A graph that runs its program: what that returned is where it leaves results."""

    def capture(self, run):
        """Run twice, as before a capture and in it."""
        self.run = run
        run()
        run()

    def replay(self):
        """Run again."""
        self.run()


def held(passes):
    """Return the bytes of results that programs keep, each memory once."""
    kept = tree_leaves([known.results for known in passes._kept.values()])
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    return sum(storages.values())


ORDERS = {"ascending": ROWS, "descending": ROWS[::-1], "mixed": ROWS[1::2] + ROWS[::2]}


@pytest.mark.parametrize("rows", ORDERS.values(), ids=ORDERS)
def test_logits_of_all_sizes_take_little_more_than_those_of_the_largest(rows):
    head = Projection(torch.randn(V, H), None)
    passes = captured(lambda: Runs, Fused)

    def program(ops, x):
        return ops.logits(x, head)

    for count in rows:
        x = torch.randn(1, count, H)
        found = passes.run((), program, {"x": x})
        assert found.shape == (1, count, V)
        torch.testing.assert_close(found, x @ head.weight.T, rtol=0, atol=1e-4)
    row = V * 4
    assert len(passes) == len(ROWS)
    assert max(ROWS) * row <= held(passes) < 2 * max(ROWS) * row


def test_an_owner_has_results_of_its_own():
    head, ones = Projection(torch.eye(H), None), torch.ones(1, 2, H)
    first = captured(lambda: Runs, Fused)
    second = first.beside()

    def program(ops, x):
        return ops.logits(x, head)

    kept = first.run((), program, {"x": ones})
    second.run((), program, {"x": 2 * ones})
    assert kept.equal(ones)


@torch.no_grad()
def test_what_is_kept_of_a_pass_outlives_passes_of_other_sizes():
    """Logits and features that the next pass may not overwrite, by a graph of another size."""
    (target, _), graphs = two_targets(tiny_model("llama", peak=1.0, **FEW))
    target.cache.spare = 8
    first, *others = (torch.stack(prompts([rows] * 2, seed=rows)) for rows in (3, 6, 1, 3))
    kept = target.verify(Tree.chain(2), first)
    logits, features = kept.logits.clone(), kept.features.clone()
    for tokens in others:
        target.verify(Tree.chain(tokens.shape[1] - 1), tokens)
    assert len(graphs) == 2
    assert kept.logits.equal(logits)
    assert kept.features.equal(features)


@torch.no_grad()
def test_passes_of_several_sizes_leave_their_logits_in_one_place():
    target = Target(tiny_model("llama", **FEW), 1, 48, "off")
    target.runner, sizes = captured_runner(target), (5, 8)
    for rows in sizes:
        target.verify(Tree.chain(rows - 1), torch.stack(prompts([rows])), reuse_buffers=True)
    kept = [known.results[0] for known in target.runner._passes._kept.values()]
    assert [x.shape[1] for x in kept] == list(sizes)
    assert len({x.data_ptr() for x in kept}) == 1


def test_tables_that_graphs_read_are_kept_however_many_come():
    """They are no inputs of a graph: it reads them where they lay when it was captured."""
    device = torch.device("cpu")
    tables = [_own_bits(first, 2, 16, device) for first in range(600)]
    again = [_own_bits(first, 2, 16, device) for first in range(600)]
    assert all(one is other for one, other in zip(tables, again, strict=True))


class Owner:
    """Stands for a graph."""


def test_pools_are_counted_once_and_as_long_as_they_have_graphs(monkeypatch):
    monkeypatch.setattr("specattn.blocks.results._graphs", {})
    gpu, device, another = FakeGPU(), torch.device("cuda", 0), torch.device("cuda", 1)
    graphs = [Owner() for _ in range(4)]
    with gpu.serving():
        before = graph_bytes(device)
        for graph, number in zip(graphs, (1, 2, 2, 3), strict=True):
            note_pool(graph, (0, number))
        assert graph_bytes(device) - before == 20 + 300
        assert graph_bytes(another) == 4000
        del graphs[:2], graph
        assert graph_bytes(device) - before == 300
        graphs.clear()
        assert graph_bytes(device) == before


def test_shared_results_are_counted_as_what_graphs_hold(monkeypatch):
    monkeypatch.setattr("specattn.blocks.results._graphs", {})
    gpu, device, another = FakeGPU(), torch.device("cuda", 0), torch.device("cuda", 1)
    graph = Owner()
    note_pool(graph, (0, 3))
    with gpu.serving():
        before = graph_bytes(device)
        like, results = torch.empty(0, device=device), Results()
        for count in (3, 4, 1):
            results.rows(count, V, like)
        assert graph_bytes(device) - before == (4 + 1) * V * 4
        assert graph_bytes(another) == 4000
        del results
        assert graph_bytes(device) == before


@pytest.mark.parametrize("allocator", ["cudaMallocAsync", "pluggable"])
def test_an_allocator_that_tells_nothing_of_its_pools_is_not_asked(allocator, monkeypatch):
    monkeypatch.setattr("specattn.blocks.results._graphs", {})
    gpu, device = FakeGPU(), torch.device("cuda", 0)
    gpu.allocator = allocator
    with gpu.serving():
        graph, results = Owner(), Results()
        note_pool(graph, (0, 1))
        results.rows(4, V, torch.empty(0, device=device))
        assert graph_bytes(device) == 4 * V * 4
