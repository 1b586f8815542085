"""Captured passes: replayed without Python they are those of the model's modules.

There is no GPU here: `tape.TapeGraph` keeps and replays operators as a CUDA graph does launches.
"""

from itertools import product

import pytest
import torch

from specattn.blocks import Unrecognised
from specattn.decoding import METHODS, generate
from specattn.decoding.engine.target import Target
from specattn.decoding.passes import replay
from specattn.decoding.passes.attention import CaptureSpec, Selection
from specattn.decoding.passes.graphs import GraphRunner
from specattn.decoding.passes.padding import SPARE, padded_rows
from specattn.tree import Tree
from tests.decoding.models import CONFIGS, prompts, tiny_model
from tests.decoding.tape import TapeGraph

LENGTHS = [0, 5, 19]
TREES = [Tree([-1, 0, 0, 1, 1, 2, 5]), Tree.chain(6), Tree.chain(0)]


def two_targets(model):
    """Return a target that replays and one that does not, and the graphs of the first."""
    targets, graphs = [Target(model, len(LENGTHS), 48, "off") for _ in range(2)], []

    def graph():
        graphs.append(TapeGraph())
        return graphs[-1]

    targets[0].runner = GraphRunner(model, lambda: graph)
    with torch.no_grad():
        for target in targets:
            target.prefill(prompts(LENGTHS), chunk_size=1000)
    return targets, graphs


def assert_same(found, expected):
    """The same kernels on the same numbers: the same bits."""
    assert not found.isnan().any()
    assert torch.equal(found, expected)


def families_and_trees():
    """Yield all pairs; a tree in all families, a chain and a root in one are quick."""
    for family, tree in product(CONFIGS, TREES):
        quick = tree is TREES[0] or family == "qwen3"
        marks = () if quick else pytest.mark.slow
        yield pytest.param(family, tree, marks=marks, id=f"{family}-{tree!r}")


@pytest.mark.parametrize(("family", "tree"), list(families_and_trees()))
def test_a_replay_reads_what_its_tensors_hold_now(family, tree):
    targets, graphs = two_targets(tiny_model(family))
    for seed in (3, 4, 5):
        tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=seed))
        with torch.no_grad():
            found, expected = (target.verify(tree, tokens) for target in targets)
        assert_same(found.logits, expected.logits)
        assert_same(found.features, expected.features)
        for target in targets:
            target.cache.seqlens = target.cache.seqlens + min(tree.size, 2)
    assert [graph.replays for graph in graphs if graph.replays] == [3]


SHAPES = [
    pytest.param([Tree.chain(4), Tree([-1, 0, 0, 1, 1]), Tree([-1, 0, 1, 0, 3])], 1, id="rows"),
    pytest.param([Tree.chain(5), TREES[0], TREES[1], Tree.chain(7)], 1, id="padded"),
    pytest.param([Tree.chain(1), Tree.chain(2), Tree.chain(9)], 3, id="sizes"),
    pytest.param([Tree.stack([Tree.chain(3), TREES[0], Tree([-1, 0])]), TREES[0]], 1, id="ragged"),
]


@pytest.mark.parametrize(("trees", "count"), SHAPES)
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_next"])
def test_trees_of_few_more_rows_share_a_graph(family, trees, count):
    """Whatever their form, with windows and with states; what is committed is the real rows'."""
    targets, graphs = two_targets(tiny_model(family))
    targets[0].cache.spare = 8
    for seed, tree in enumerate(trees + trees[:1], start=3):
        tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=seed))
        nodes = tree.paths[..., tree.size - 1, 1:2].clamp_min(0).expand(len(LENGTHS), 1)
        with torch.no_grad():
            found, expected = (target.verify(tree, tokens) for target in targets)
            for target in targets:
                target.cache.commit(nodes, torch.ones(len(LENGTHS), dtype=torch.int64))
        for name in ("logits", "features"):
            own, exact = getattr(found, name), getattr(expected, name)
            # torch's products of more rows may add up in another order.
            assert ((own - exact).norm(dim=-1) <= 1e-5 * exact.norm(dim=-1)).all()
    assert len(graphs) == count


@pytest.mark.parametrize("spare", [0, 2])
def test_no_row_is_added_beyond_what_is_spare(spare):
    targets, graphs = two_targets(tiny_model("llama"))
    targets[0].cache.spare = spare
    for tree in (TREES[0], Tree.chain(7)):  # 3 x 7 rows are padded to 3 x 8
        with torch.no_grad():
            targets[0].verify(tree, torch.stack(prompts([tree.size] * len(LENGTHS))))
    assert len(graphs) == (1 if spare else 2)


def test_a_pass_of_256_rows_is_replayed():
    """As a tree of 255 drafted nodes needs; of 513 rows it is not."""
    model, counts = tiny_model("llama"), []
    for tree in (Tree([-1, *range(16), *range(239)]), Tree.chain(512)):
        targets, graphs = [Target(model, 1, 520, "off") for _ in range(2)], []

        def graph(own=graphs):
            own.append(TapeGraph())
            return own[-1]

        targets[0].runner = GraphRunner(model, lambda own=graph: own)
        for seed in (3, 4):
            tokens = torch.stack(prompts([tree.size], seed=seed))
            with torch.no_grad():
                found, expected = (target.verify(tree, tokens) for target in targets)
            assert_same(found.logits, expected.logits)
        counts.append([graph.replays for graph in graphs])
    assert counts == [[2], []]


def test_padded_sizes():
    assert [padded_rows(1, rows) for rows in (1, 2, 3, 5, 9, 17, 65, 128)] == [
        *(1, 2, 4, 8, 16, 24, 96, 128)
    ]
    assert [padded_rows(1, rows) for rows in (129, 200, 512)] == [160, 224, 512]
    assert [padded_rows(3, rows) for rows in (1, 2, 5, 6, 43)] == [1, 2, 5, 8, 53]
    assert [padded_rows(25, rows) for rows in (1, 2, 3, 5)] == [1, 2, 3, 5]
    for batch in range(1, 513):
        sizes = range(1, 512 // batch + 1)
        assert max(padded_rows(batch, n) - n for n in sizes) < SPARE
        assert all(n <= padded_rows(batch, n) <= 512 // batch for n in sizes)


@pytest.mark.parametrize(
    "capture",
    [
        CaptureSpec((0, -1)),
        CaptureSpec((-1,), per_head=True),
        CaptureSpec((0, 2), ranking="weight"),
        CaptureSpec((0, 2), per_row=True),
        CaptureSpec(queries=True),
    ],
    ids=repr,
)
def test_what_is_captured_beside(capture):
    targets, _ = two_targets(tiny_model("llama"))
    tree = TREES[0]
    for seed in (3, 4):
        tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=seed))
        with torch.no_grad():
            found, expected = (t.verify(tree, tokens, capture=capture) for t in targets)
        for name in ("logits", "scores", "queries"):
            if getattr(expected, name) is None:
                assert getattr(found, name) is None
            else:
                torch.testing.assert_close(
                    getattr(found, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True
                )


def test_a_selection_and_an_offset_may_change():
    targets, graphs = two_targets(tiny_model("qwen3"))
    layers = len(targets[0].full_layers)
    for seed in (3, 4):
        generator = torch.Generator().manual_seed(seed)
        kept = torch.rand(layers, len(LENGTHS), 8, generator=generator)
        lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
        limits = torch.tensor([1, 5, 19])[:, None]
        indices = (kept * limits).int().sort(-1).values
        tokens = torch.stack(prompts([2] * len(LENGTHS), seed=seed))
        with torch.no_grad():
            selection = Selection(indices, lengths)
            found, expected = (t.draft(tokens, seed, selection) for t in targets)
        assert_same(found.logits, expected.logits)
    assert [graph.replays for graph in graphs if graph.replays] == [2]


@pytest.mark.parametrize("method", ["plain", "auto", "vegas", "suffix", "quest", "triforce"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_those_of_the_models_modules(method, temperature, monkeypatch):
    model, taken = tiny_model("llama"), []

    def replayed(target, compile):
        taken.append(GraphRunner(target.model, lambda: TapeGraph))
        return taken[-1]

    settings = {"max_new_tokens": 20, "temperature": temperature, "seed": 1}
    settings["do_sample"] = temperature > 0
    expected = generate(model, prompts([5, 19]), METHODS[method](), compile="off", **settings)
    monkeypatch.setattr(Target, "_runner", replayed)
    found = generate(model, prompts([5, 19]), METHODS[method](), **settings)
    for one, other in zip(found.sequences, expected.sequences, strict=True):
        assert torch.equal(one, other)
    assert taken[-1]._passes._kept, "nothing was captured"


def test_a_model_that_asks_the_device_is_refused(monkeypatch):
    model = tiny_model("llama")
    inner = model.model.layers[0].mlp.forward

    def asks(x):
        return inner(x) * (2.0 if x.sum().item() > 1e9 else 1.0)

    target = Target(model, 2, 48, "off")
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", asks)
    runner = GraphRunner(model, lambda: TapeGraph)
    with pytest.raises(Unrecognised, match="cannot be captured: operation not permitted"):
        replay._check(target, runner)


def test_one_whose_replay_differs_is_refused():
    class Forgetful(TapeGraph):
        def replay(self):
            """Do nothing."""

    target = Target(tiny_model("llama"), 2, 48, "off")
    runner = GraphRunner(target.model, lambda: Forgetful)
    with pytest.raises(Unrecognised, match="replayed, features differ by"):
        replay._check(target, runner)
