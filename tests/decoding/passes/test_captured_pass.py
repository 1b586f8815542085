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
from specattn.decoding.passes.runner import GraphRunner
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
