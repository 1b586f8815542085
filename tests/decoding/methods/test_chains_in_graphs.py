"""Chains that captured kernels draft, all steps in one graph: those drafted step by step."""

import pytest
import torch

pytest.importorskip("triton")

from specattn.blocks import TORCH, Drawing
from specattn.blocks.fused import Fused
from specattn.decoding import Cast, LongSpec, Quest, Vegas, generate
from specattn.decoding.engine.target import Target
from specattn.decoding.methods.quest import PageBounds, Pages
from specattn.decoding.passes.attention import Selection
from specattn.drafters import LongSpecDrafter
from tests.decoding.captured import FEW, LENGTHS, assert_alike, captured_runner, two_targets
from tests.decoding.models import prompts, tiny_model

STEPS = 3
DRAFTS = {
    "vegas": lambda model: Vegas(gamma=STEPS, budget=4, min_tokens=4),
    "vegas by head": lambda model: Vegas(gamma=STEPS, budget=4, min_tokens=4, per_head=True),
    "cast": lambda model: Cast(gamma=STEPS),
    "quest": lambda model: Quest(gamma=STEPS, budget=4, min_tokens=4, page_size=4),
    "longspec": lambda model: LongSpec(
        LongSpecDrafter.for_target(model, target="toy", window=16), gamma=STEPS
    ),
}
SLOW = pytest.mark.slow


def drawing(seeded, warm):
    seed = torch.tensor([-7]) if seeded else None
    temperatures = torch.tensor([0.5, 1.0, 2.0]) if warm else None
    return Drawing(torch.tensor([[0, 4, 2], [9, 5, 1000]]), seed, temperatures)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seeded", "warm"), [(False, False), (True, False), (True, True)])
def test_tokens_are_drawn_as_by_torch(dtype, seeded, warm):
    logits = (3 * torch.randn(3, 1, 5000, generator=torch.Generator().manual_seed(1))).to(dtype)
    logits[1, 0, 17] = torch.nan  # no token can follow
    how = drawing(seeded, warm)
    found = [Fused().draw(logits, ahead, how) for ahead in range(3)]
    assert all(one.equal(TORCH.draw(logits, n, how)) for n, one in enumerate(found))
    assert found[0][1].item() == 0
    assert found[0].equal(found[1]) is not seeded


@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("vegas", 0.0),
        ("longspec", 0.8),
        *(
            pytest.param(*one, marks=SLOW)
            for one in (
                ("vegas", 0.8), ("vegas by head", 0.0), ("cast", 0.0), ("cast", 0.8),
                ("longspec", 0.0), ("longspec", 0.7), ("vegas", 0.7),
                ("quest", 0.0), ("quest", 0.8),
            )
        ),
    ],
)  # fmt: skip
def test_a_chain_is_one_graph(name, temperature, monkeypatch):
    """So are its tokens, and the text."""
    monkeypatch.setattr("specattn.quantised._BY_TILES", ())  # codes of a GPU do not lie in tiles
    model, graphs, rounds = tiny_model("llama", **FEW), [], []
    method, texts = DRAFTS[name](model), prompts([5, 9])
    options = {"max_new_tokens": 6, "temperature": temperature, "seed": 3}
    options["do_sample"] = temperature > 0
    options["top_k"] = 50 if temperature == 0.8 else 0
    verify = Target.verify

    def noting(target, tree, tokens, **how):
        rounds[-1].append(tokens.tolist())
        return verify(target, tree, tokens, **how)

    def captured(target, model):
        return captured_runner(target if model is target else model, graphs)

    monkeypatch.setattr(Target, "verify", noting)
    found = []
    for compile in ("off", "auto"):
        rounds.append([])
        found.append(generate(model, texts, method, compile=compile, **options).new_tokens)
        monkeypatch.setattr(Target, "_runner", captured)
    assert found[0] == found[1]
    if name != "cast":  # whose rounded weights modules multiply with otherwise
        assert rounds[0] == rounds[1]
    assert max(len(tokens[0]) for tokens in rounds[1]) == STEPS + 1
    if name.startswith("vegas"):  # its verifications choose what the next draft reads
        assert {graph.tape.kernels.count("select_kernel") for graph in graphs} == {0, 1}
    chain = "part_kernel" if (name, temperature) == ("longspec", 0.0) else "drawn_kernel"
    assert max(graph.tape.kernels.count(chain) for graph in graphs) == STEPS


@torch.no_grad()
def test_a_step_that_chooses_by_its_queries_is_captured_too():
    """And replayed on other lengths; a graph that reads memory elsewhere is another one."""
    model, method = tiny_model("llama", **FEW), DRAFTS["quest"](None)
    targets, graphs = two_targets(model)
    bounds = [PageBounds(target, method.page_size) for target in targets]
    for replays in ([1], [2], [2, 1]):
        tokens = torch.stack(prompts([1] * len(LENGTHS), seed=len(replays)))
        found = []
        for target, own in zip(targets, bounds, strict=True):
            own.read_all()
            moving = own.counts | {"visible": target.cache.seqlens}
            found.append(target.draft(tokens, 0, Pages(method, own, moving)).logits)
            target.cache.seqlens = target.cache.seqlens + 1
        assert_alike(model, *found)
        assert [graph.replays for graph in graphs] == replays
        if replays == [2]:
            bounds[0].values = bounds[0].values.clone()


def test_selections_of_other_positions_are_drafted_step_by_step():
    model, tokens = tiny_model("llama", **FEW), torch.stack(prompts([9]))
    target = Target(model, 1, 48, "off")
    target.runner = captured_runner(target)
    target.prefill([tokens[0]], chunk_size=100)
    indices = [torch.arange(n, n + 4, dtype=torch.int32).expand(1, 1, 4) for n in (0, 2)]
    apart = [Selection(one, torch.tensor([2], dtype=torch.int32)) for one in indices]
    alike = [apart[0], apart[0].extended(1)]
    how = Drawing(torch.tensor([[0], [9]]))
    drafted = [target.draft_chain(tokens[:, -1], one, lambda: how) for one in (apart, alike)]
    assert drafted[0] is None
    assert drafted[1].shape == (1, 3)
    for other in (None, apart[0], apart[0].extended(2)):
        assert target.draft_chain(tokens[:, -1], [apart[0], other], lambda: how) is None
    assert target.draft_chain(tokens[:, -1], alike, lambda: None) is None
