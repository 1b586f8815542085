"""Passes of our kernels in graphs that are stubs, and what they are compared with.

There is no GPU here: Triton's interpreter runs the kernels, and `tape.TapeGraph` keeps and replays
them as a CUDA graph does. Whoever imports this needs Triton.
"""

import torch

from specattn.decoding.engine.target import Target
from specattn.decoding.passes.captured import CapturedRunner
from specattn.decoding.passes.runner import LayerAttention
from tests.decoding.models import prompts
from tests.decoding.tape import TapeGraph

LENGTHS = [5, 19]
FEW = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
"""What quick models have: the interpreter runs every head of every layer one after the other."""
IN_MODULES = ("quest", "triforce-hierarchy")
"""Methods with a KV selector that asks for queries, or a model of their own."""


def captured_runner(target, graphs=None):
    """Return what runs a target's passes in graphs that are kept in a list."""
    graphs = [] if graphs is None else graphs

    def graph():
        graphs.append(TapeGraph())
        return graphs[-1]

    attention = LayerAttention(target.cache, target.windows, target.longest)
    return CapturedRunner(target.model, attention, lambda: graph)


def two_targets(model, capacity=48, **options):
    """Return targets of fused kernels and of modules, of the same texts; the first one's graphs."""
    targets = [Target(model, len(LENGTHS), capacity, "off", **options) for _ in range(2)]
    graphs = []
    targets[0].runner = captured_runner(targets[0], graphs)
    with torch.no_grad():
        targets[1].prefill(prompts(LENGTHS), chunk_size=1000)
    caches = [target.cache for target in targets]
    caches[0].storage.copy_(caches[1].storage)
    caches[0].seqlens = caches[1].seqlens
    if caches[0].states is not None:
        caches[0].states.restore(caches[1].states.copy())
    return targets, graphs


def assert_alike(model, found, expected):
    """Within the rounding of a few layers, as a share of the largest value."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.05, torch.float16: 0.01}[model.dtype]
    scale = expected.float().abs().max().item()
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=0, atol=tolerance * max(scale, 1.0)
    )
