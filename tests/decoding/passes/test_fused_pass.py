"""Captured passes of our kernels on a model's parts: those of its modules, in few launches.

There is no GPU here: Triton's interpreter runs the kernels, and `tape.TapeGraph` keeps and replays
them as a CUDA graph does.
"""

import warnings
from collections import Counter
from contextlib import nullcontext

import pytest
import torch

import specattn
from specattn.blocks import Projection
from specattn.call_forms import NotServed
from specattn.decoding import METHODS, generate
from specattn.decoding.engine.target import Target
from specattn.decoding.model.quantised import quantised
from specattn.decoding.passes import replay
from specattn.decoding.passes.graphs import GraphRunner
from specattn.decoding.passes.runner import LayerAttention
from specattn.quantised import quantise
from specattn.tree import Tree
from tests.decoding.models import CONFIGS, prompts, tiny_model
from tests.decoding.tape import Tape, TapeGraph

if specattn.backends()["triton"] != "available":
    pytest.skip("Triton is not available here", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from specattn.blocks.fused import Fused
from specattn.decoding.passes.captured import CapturedRunner
from tests.decoding.captured import FEW, LENGTHS, assert_alike, captured_runner, two_targets

TREES = [Tree([-1, 0, 0, 1, 1, 2, 5]), Tree.chain(6), Tree.chain(0)]


QUICK = ("gemma2", "phi4")
SERVED = [*CONFIGS, "gemma2", "gemma3", "phi3", "phi4", "olmo2", "smollm3"]
SERVED += ["qwen3_5", "qwen3_next", "deepseek_v3"]  # layers with a state, and with latents


def families_and_trees():
    """Yield pairs, and what makes models smaller: few are quick."""
    small = FEW | {"num_hidden_layers": 2}
    for family in SERVED:
        if family in QUICK:
            yield pytest.param(family, TREES[0], small, id=f"{family}-tree")
        else:
            yield pytest.param(family, TREES[0], {}, marks=pytest.mark.slow, id=f"{family}-tree")
    yield pytest.param("qwen3", TREES[1], small, id="qwen3-chain")
    yield pytest.param("qwen3", TREES[2], small, id="qwen3-root")


@pytest.mark.parametrize(("family", "tree", "sizes"), list(families_and_trees()))
def test_verification_is_the_models_own(family, tree, sizes):
    """Twice with other tokens and lengths: what is captured first is replayed."""
    model = tiny_model(family, peak=1.0, **sizes)
    targets, graphs = two_targets(model)
    for seed in (3, 4):
        tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=seed))
        with torch.no_grad():
            found, expected = (target.verify(tree, tokens) for target in targets)
        assert_alike(model, found.logits, expected.logits)
        assert_alike(model, found.features, expected.features)
        for target in targets:
            target.cache.seqlens = target.cache.seqlens + min(tree.size, 2)
    assert [graph.replays for graph in graphs] == [2]


@pytest.mark.slow
def test_a_pass_of_many_rows_is_replayed():
    """Of products of more rows than the kernel takes torch's are in the same graph."""
    model, tree = tiny_model("qwen3", peak=1.0, **FEW), Tree([-1, *range(16), *range(119)])
    targets, graphs = [Target(model, 1, 140, "off") for _ in range(2)], []
    targets[0].runner = captured_runner(targets[0], graphs)
    for seed in (3, 4):
        tokens = torch.stack(prompts([tree.size], seed=seed))
        with torch.no_grad():
            found, expected = (target.verify(tree, tokens) for target in targets)
        assert_alike(model, found.logits, expected.logits)
    assert [graph.replays for graph in graphs] == [2]


@pytest.mark.parametrize(
    ("kind", "rows", "launches"),
    [
        ("int4", 6, 4),
        pytest.param("int8", 6, 4, marks=pytest.mark.slow),
        ("fp8", 6, 4),
        pytest.param("int8", 40, 0, marks=pytest.mark.slow),
        pytest.param("int4", 40, 0, marks=pytest.mark.slow),
        pytest.param("fp8", 40, 0, marks=pytest.mark.slow),
    ],
)
def test_codes_are_multiplied_by_their_kernel(kind, rows, launches, monkeypatch):
    """q, k and v by one launch, as gate and up; many rows by torch."""
    monkeypatch.setattr("specattn.quantised._IN_KERNELS", ())  # of a CPU, which no graph keeps
    monkeypatch.setattr("specattn.quantised._BY_TILES", ())  # nor do these lie on a GPU
    model = quantised(tiny_model("qwen3", peak=1.0, hidden_size=64, **FEW), kind)
    targets, graphs = two_targets(model, capacity=64)
    tree = Tree.chain(rows - 1)
    tokens = torch.stack(prompts([rows] * len(LENGTHS), seed=rows))
    with torch.no_grad():
        found, expected = (target.verify(tree, tokens) for target in targets)
    assert_alike(model, found.logits, expected.logits)
    (graph,) = graphs
    assert graph.tape.kernels.count("linear_codes_kernel") == launches


@pytest.mark.parametrize("coded", [False, True])
def test_a_layer_of_one_output_has_a_launch_of_its_own(coded):
    """Compiled for one its kernel takes no weight of more."""
    weights = [torch.randn(size, 64) for size in (1, 40, 8)]
    rounded = [quantise(weight, 8) if coded else weight for weight in weights]
    x = torch.randn(1, 3, 64)
    with Tape() as tape:
        found = Fused().linear(x, *(Projection(weight, None) for weight in rounded))
    assert len(tape.kernels) == 2
    dense = [one.dequantised(torch.float32) if coded else one for one in rounded]
    torch.testing.assert_close(found, x @ torch.cat(dense).T)


def test_a_prefill_is_the_models_own():
    """Ragged, by chunks of more rows than the kernel of products takes and of fewer."""
    model, lengths = tiny_model("qwen3", peak=1.0, **FEW), [3, 72]
    targets, features = [Target(model, 2, 80, "off") for _ in range(2)], ([], [])
    targets[0].runner = captured_runner(targets[0])
    with torch.no_grad():
        for target, shown in zip(targets, features, strict=True):
            show = lambda start, parts, shown=shown: shown.append(torch.cat(list(parts)))  # noqa: E731
            target.prefill(prompts(lengths), chunk_size=70, on_features=show)
    assert_alike(model, *map(torch.cat, features))


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])
def test_a_layer_is_eight_launches(family, rows):
    """Norm, product, heads, attention, product; norm and two products. Long caches: a combine."""
    counts = []
    for layers in (1, 2):
        model = tiny_model(family, num_hidden_layers=layers)
        target, graphs = Target(model, 1, 48, "off"), []
        target.runner = captured_runner(target, graphs)
        with torch.no_grad(), specattn.use_backend("triton"):
            target.verify(Tree.chain(rows - 1), torch.stack(prompts([rows])))
        counts.append(graphs[0].tape.kernels)
    of_a_layer = Counter(counts[1]) - Counter(counts[0])
    assert of_a_layer == {
        "norm_kernel": 2,
        "linear_few_rows_kernel": 4,
        "rotate_heads_kernel": 1,
        "split_kv_kernel": 1,
    }


@pytest.mark.parametrize(
    ("method", "temperature"),
    [
        ("auto", 0.0),
        ("quest", 0.0),
        ("plain", 0.9),
        *(pytest.param(one, 0.0, marks=pytest.mark.slow) for one in ("plain", "vegas")),
        *(pytest.param(one, 0.9, marks=pytest.mark.slow) for one in ("auto", "vegas", "quest")),
    ],
)
def test_texts_are_those_of_the_models_modules(method, temperature, monkeypatch):
    model, taken = tiny_model("llama", **FEW), []

    def captured(target, compile):
        taken.append(captured_runner(target))
        return taken[-1]

    settings = {"max_new_tokens": 12, "temperature": temperature, "seed": 1}
    settings["do_sample"] = temperature > 0
    expected = generate(model, prompts([5, 19]), METHODS[method](), compile="off", **settings)
    monkeypatch.setattr(Target, "_runner", captured)
    found = generate(model, prompts([5, 19]), METHODS[method](), **settings)
    for one, other in zip(found.sequences, expected.sequences, strict=True):
        assert torch.equal(one, other)
    assert taken[-1]._passes._kept, "nothing was captured"


class Forgetful(TapeGraph):
    """A graph that does nothing."""

    def replay(self):
        """Do nothing."""


def ways(parts, modules):
    """Return a fake of `replay._ways`: parts in graphs of one kind, modules in those of another."""

    def found(target, attention, captures):
        return [
            lambda: CapturedRunner(target.model, attention, lambda: parts),
            lambda: GraphRunner(target.model, lambda: modules),
        ]

    return found


def test_parts_come_before_modules(monkeypatch):
    model = tiny_model("llama", **FEW)
    monkeypatch.setattr(replay, "_ways", ways(TapeGraph, TapeGraph))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(Target(model, 2, 48).runner) is CapturedRunner


@pytest.mark.slow
def test_what_parts_cannot_do_is_left_to_modules_and_said_once(monkeypatch):
    model = tiny_model("llama", **FEW)
    monkeypatch.setattr(replay, "_ways", ways(Forgetful, TapeGraph))
    with pytest.warns(UserWarning, match="graphs of its own, slower modules: .*features differ by"):
        assert type(Target(model, 2, 48).runner) is GraphRunner
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(Target(model, 2, 48).runner) is GraphRunner
        assert type(Target(model, 2, 48, "on").runner) is GraphRunner


class Cramped(TapeGraph):
    """A graph of a card whose shared memory is too small for a kernel."""

    def capture(self, run):
        """Fail as Triton does where it launches one."""
        raise OutOfResources(required=240_000, limit=101_376, name="shared memory")


def test_a_card_without_room_for_a_kernel_runs_the_modules(monkeypatch):
    model = tiny_model("llama", **FEW)
    monkeypatch.setattr(replay, "_ways", ways(Cramped, TapeGraph))
    with pytest.warns(UserWarning, match="cannot be captured: out of resource: shared memory"):
        assert type(Target(model, 2, 48).runner) is GraphRunner


class Declined(TapeGraph):
    """A graph of a kernel that this machine's Triton compiles wrong."""

    def capture(self, run):
        """Fail as the launcher does, before it launches one."""
        raise NotServed("a shape that this Triton miscompiles")


@pytest.mark.parametrize("fails", [Cramped, Declined])
def test_rows_for_which_a_card_has_no_room_run_through_the_modules(fails):
    """Said once; the pass is the modules', and no draft is so large from then on."""
    model, graphs = tiny_model("llama", **FEW), []
    targets, _ = two_targets(model)

    def graph():
        graphs.append(TapeGraph() if not graphs else fails())
        return graphs[-1]

    targets[0].runner = runner = CapturedRunner(
        model, LayerAttention(targets[0].cache, targets[0].windows, 48), lambda: graph
    )
    for rows in (1, 7, 7, 1):
        tree, tokens = Tree.chain(rows - 1), torch.stack(prompts([rows] * 2, seed=rows))
        first = rows == 7 and runner.most_rows == CapturedRunner.most_rows
        said = pytest.warns(UserWarning, match="of 14 rows and more") if first else nullcontext()
        with torch.no_grad(), said:
            found, expected = (target.verify(tree, tokens).logits for target in targets)
        assert_alike(model, found, expected)
    assert (runner.most_rows, len(graphs)) == (13, 2)
    targets[0].runner = CapturedRunner(model, runner.attention, lambda: graph)  # of another run
    del graphs[:]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for rows in (1, 7):
            targets[0].verify(Tree.chain(rows - 1), torch.stack(prompts([rows] * 2)))
    assert len(graphs) == 2


@pytest.mark.slow
def test_what_no_graph_can_do_is_left_to_calls_and_said_once(monkeypatch):
    model = tiny_model("llama", **FEW)
    monkeypatch.setattr(replay, "_ways", ways(Forgetful, Forgetful))
    with pytest.warns(UserWarning, match="through its own, slower modules: replayed, features"):
        assert not Target(model, 2, 48).runner.captures
    with pytest.raises(ValueError, match="compile='on': replayed, features differ by"):
        Target(model, 2, 48, "on")


@pytest.mark.slow
def test_a_model_that_was_converted_is_compared_anew(monkeypatch):
    model, compared = tiny_model("llama", **FEW), []
    check = replay._check
    monkeypatch.setattr(replay, "_ways", ways(TapeGraph, TapeGraph))
    monkeypatch.setattr(replay, "_check", lambda *one: (compared.append(one), check(*one)))
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        target = Target(model.to(dtype), 2, 48)
        assert type(target.runner) is CapturedRunner
    assert [target.model.dtype for target, _ in compared] == [torch.bfloat16] * 2
    assert len(compared) == 2


def test_where_memory_is_full_fewer_shapes_are_kept():
    made = []

    class Third(TapeGraph):
        def capture(self, run):
            made.append(self)
            if len(made) == 3:
                raise torch.OutOfMemoryError
            super().capture(run)

    model = tiny_model("llama", peak=1.0, **FEW)
    targets = [Target(model, 2, 48, "off") for _ in range(2)]
    attention = LayerAttention(targets[0].cache, targets[0].windows, targets[0].longest)
    targets[0].runner = CapturedRunner(model, attention, lambda: Third)

    def verified(rows):
        tokens = torch.stack(prompts([rows] * 2, seed=rows))
        found, expected = (t.verify(Tree.chain(rows - 1), tokens) for t in targets)
        assert_alike(model, found.logits, expected.logits)

    with torch.no_grad():
        for target in targets:
            target.prefill(prompts([5, 19]), chunk_size=1000)
        verified(1)
        verified(2)
        with pytest.warns(UserWarning, match="memory is full: fewer shapes"):
            verified(4)
        for rows in (3, 2, 1):
            verified(rows)
    assert len(targets[0].runner._passes._kept) == 1
