"""A batch whose requests end one after the other: what was captured for all serves those left."""

import pytest
import torch

import specattn
from specattn.blocks import captured
from specattn.blocks import programs as blocks
from specattn.decoding import DFlash, Eagle3, LongSpec, Medusa, Plain, PosS, Vegas, generate
from specattn.decoding.engine.target import Target
from specattn.decoding.passes.attention import NO_CAPTURE, CaptureSpec
from specattn.decoding.passes.graphs import GraphRunner
from specattn.tree import Tree
from tests.decoding.models import ending_at, prompts, tiny_model
from tests.decoding.tape import TapeGraph
from tests.drafters import dflash_statement, eagle3_statement, poss_statement, statement
from tests.drafters.test_heads import random_heads

LENGTHS, END = (5, 9, 14), 24


METHODS = {
    "plain": lambda model: Plain(),
    "vegas": lambda model: Vegas(gamma=3, budget=4, min_tokens=4),
    "eagle3": lambda model: Eagle3(
        eagle3_statement.random_drafter(model, layers=(1,), dtype=torch.float32),
        width=3, depth=2, total_tokens=7,
    ),
    "poss": lambda model: PosS(
        poss_statement.random_drafter(model, layers=2, dtype=torch.float32),
        width=3, depth=2, total_tokens=7,
    ),
    "longspec": lambda model: LongSpec(
        statement.random_drafter(model, window=9, dtype=torch.float32), widths=(2, 2)
    ),
    "longspec chain": lambda model: LongSpec(
        statement.random_drafter(model, window=9, dtype=torch.float32), gamma=3
    ),
    "medusa": lambda model: Medusa(random_heads("medusa", model, dtype=torch.float32), (2, 2)),
    "dflash": lambda model: DFlash(dflash_statement.random_drafter(model), total_tokens=8),
}  # fmt: skip


def by_modules(target, graphs):
    return GraphRunner(target.model, lambda: lambda: noted(graphs))


def by_kernels(target, graphs):
    from tests.decoding.captured import captured_runner

    return captured_runner(target, graphs)


def noted(graphs):
    graphs.append(TapeGraph())
    return graphs[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_captured_when_requests_end(name, temperature, monkeypatch):
    assert_none_is_captured(name, temperature, by_modules, monkeypatch)


@pytest.mark.skipif(specattn.backends()["triton"] != "available", reason="needs Triton")
@pytest.mark.parametrize(
    "name",
    ["vegas", *(pytest.param(one, marks=pytest.mark.slow) for one in ("poss", "longspec chain"))],
)
def test_nor_are_graphs_of_kernels(name, monkeypatch):
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    assert_none_is_captured(name, 0.0, by_kernels, monkeypatch, (5, 7, 10), 14, **few)


def assert_none_is_captured(
    name, temperature, make, monkeypatch, lengths=LENGTHS, end=END, **sizes
):
    """The text is that of passes that are not captured."""
    model, graphs, made = tiny_model("llama", **sizes), [], []
    method, texts = METHODS[name](model), prompts(lengths)
    options = ending_at(end) | {"temperature": temperature, "do_sample": temperature > 0, "seed": 3}
    expected = generate(model, texts, method, compile="off", **options).new_tokens
    verify = Target.verify

    def noting(target, tree, tokens, **how):
        found = verify(target, tree, tokens, **how)
        made.append((len(tokens), len(graphs)))
        return found

    monkeypatch.setattr(Target, "verify", noting)
    monkeypatch.setattr(Target, "_runner", lambda target, model: make(target, graphs))
    assert generate(model, texts, method, **options).new_tokens == expected
    assert {batch for batch, _ in made} == {1, 2, 3}
    assert len(graphs) == max(count for batch, count in made if batch == 3) > 0


def two_targets(model, spare=0):
    """Return targets that replay and that do not, of three texts; and the graphs of the first."""
    targets, graphs = [Target(model, len(LENGTHS), 48, "off") for _ in range(2)], []
    targets[0].runner = by_modules(targets[0], graphs)
    targets[0].cache.spare = spare
    with torch.no_grad():
        for target in targets:
            target.prefill(prompts(LENGTHS), chunk_size=1000)
    return targets, graphs


def verified(targets, tree, **options):
    """Return what targets say of the same tokens."""
    batch = targets[0].cache.batch_size
    tokens = torch.stack(prompts([tree.size] * batch, seed=tree.size))
    with torch.no_grad():
        return [target.verify(tree, tokens, **options) for target in targets]


def assert_same(found, expected):
    """As exactly as torch's products of more rows, which may add up in another order."""
    for name in ("logits", "features", "scores", "queries"):
        own, exact = getattr(found, name), getattr(expected, name)
        assert (own is None) == (exact is None)
        if own is not None:
            assert torch.equal(own.isinf(), exact.isinf())
            own, exact = (x.masked_fill(x.isinf(), 0.0) for x in (own, exact))
            assert ((own - exact).norm(dim=-1) <= 1e-5 * exact.norm(dim=-1)).all()


@pytest.mark.parametrize(
    "capture",
    [
        NO_CAPTURE,
        CaptureSpec((0, -1)),
        CaptureSpec((-1,), per_head=True),
        CaptureSpec(queries=True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("tree", [Tree.chain(0), Tree([-1, 0, 0, 1, 1])], ids=repr)
def test_a_graph_of_more_requests_hands_out_those_that_are_left(tree, capture):
    targets, graphs = two_targets(tiny_model("llama"))
    for finished in ([False, True, False], [True, False], [False]):
        assert_same(*verified(targets, tree, capture=capture))
        for target in targets:
            target.cache.retire(finished)
        if targets[0].cache.batch_size:
            assert targets[0].captured_rows(tree.size, capture) == 3 * tree.size
    assert [graph.replays for graph in graphs] == [3]


def test_a_graph_of_more_rows_serves_fewer_where_there_is_room():
    targets, graphs = two_targets(tiny_model("llama"), spare=4)
    rows = [targets[0].captured_rows(n) for n in (1, 8, 9)]
    assert rows == [None] * 3
    for size in (8, 6, 1, 4, 3):  # to 1 and 3 five rows or more would be added
        assert_same(*verified(targets, Tree.chain(size - 1)))
    assert len(graphs) == 3
    assert [targets[0].captured_rows(n) for n in (1, 2, 3, 4, 8, 9)] == [3, 15, 15, 15, 24, None]
    assert targets[1].captured_rows(8) is None


def test_a_size_is_captured_when_padding_has_taken_as_long(monkeypatch):
    monkeypatch.setattr(blocks, "_CAPTURE", 17)
    targets, graphs = two_targets(tiny_model("llama"))
    verified(targets, Tree.chain(3))
    for target in targets:
        target.cache.retire([True, False, False])
    for _ in range(7):  # four more rows in each
        assert_same(*verified(targets, Tree.chain(3)))
    assert [graph.replays for graph in graphs] == [5, 3]
    assert targets[0].captured_rows(4) == 8


def test_what_is_no_longer_kept_serves_nobody():
    passes, graphs = captured(lambda: lambda: noted(graphs)), []
    passes._most = 2

    def program(ops, x):
        return x + 1

    for batch, width in ((4, 1), (2, 2), (2, 3), (3, 1)):
        x = torch.full((batch, width), 1.0 * batch)
        assert passes.run(width, program, {"x": x}, batch).equal(x + 1)
    assert len(graphs) == 4
    assert passes.run(3, program, {"x": torch.zeros(1, 3)}, 1).equal(torch.ones(1, 3))
    assert len(graphs) == 4


def test_layers_with_a_state_keep_graphs_of_their_own_size():
    """Their states lie by the number of requests."""
    targets, graphs = two_targets(tiny_model("qwen3_next"))
    for finished in ([False, True, False], [False, False]):
        assert_same(*verified(targets, Tree.chain(2)))
        for target in targets:
            target.cache.commit(
                torch.empty(len(target.cache.seqlens), 0).long(),
                0 * target.cache.seqlens,
                in_place=True,
            )
            target.cache.retire(finished)
    assert len(graphs) == 2
