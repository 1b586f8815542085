"""Passes of our kernels on a model's parts, captured: those of the model's modules, in few launches.

There is no GPU here: Triton's interpreter runs the kernels, and `tape.TapeGraph` keeps and replays
them as a CUDA graph does.
"""

import pytest
import torch

import specattn
from specattn.decoding import METHODS, generate
from specattn.decoding.engine.target import Target
from specattn.decoding.passes.attention import CaptureSpec, Selection
from specattn.decoding.passes.runner import LayerAttention
from specattn.tree import Tree
from tests.decoding.models import CONFIGS, HYBRIDS, LATENTS, OTHERS, prompts, tiny_model
from tests.decoding.tape import TapeGraph

if specattn.backends()["triton"] != "available":
    pytest.skip("Triton is not available here", allow_module_level=True)

from specattn.decoding.passes.captured import CapturedRunner

LENGTHS = [0, 5, 19]
TREES = [Tree([-1, 0, 0, 1, 1, 2, 5]), Tree.chain(6), Tree.chain(0)]


def captured_runner(target, graphs=None):
    """Return what runs a target's passes in graphs that are kept in a list."""
    graphs = [] if graphs is None else graphs

    def graph():
        graphs.append(TapeGraph())
        return graphs[-1]

    attention = LayerAttention(target.cache, target.windows, target.longest)
    return CapturedRunner(target.model, attention, lambda: graph)


def two_targets(model):
    """Return a target of fused kernels and one of modules, both prefilled; the first's graphs."""
    targets, graphs = [Target(model, len(LENGTHS), 48, "off") for _ in range(2)], []
    targets[0].runner = captured_runner(targets[0], graphs)
    with torch.no_grad():
        for target in targets:
            target.prefill(prompts(LENGTHS), chunk_size=8)
    return targets, graphs


def assert_alike(model, found, expected):
    """Within the rounding of a few layers, as a share of the largest value."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[model.dtype]
    scale = expected.float().abs().max().item()
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=0, atol=tolerance * max(scale, 1.0)
    )


@pytest.mark.parametrize("tree", TREES, ids=repr)
@pytest.mark.parametrize("family", CONFIGS)
def test_verification_is_the_models_own(family, tree):
    """Three times with other tokens and lengths: what is captured first is replayed."""
    model = tiny_model(family, peak=1.0)
    targets, graphs = two_targets(model)
    for seed in (3, 4, 5):
        tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=seed))
        with torch.no_grad():
            found, expected = (target.verify(tree, tokens) for target in targets)
        assert_alike(model, found.logits, expected.logits)
        assert_alike(model, found.features, expected.features)
        for target in targets:
            target.cache.seqlens = target.cache.seqlens + min(tree.size, 2)
    assert [graph.replays for graph in graphs] == [3]
