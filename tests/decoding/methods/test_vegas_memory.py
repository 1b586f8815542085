"""A round of Vegas allocates nothing that grows with the context but scores."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import LogitsProcessorList

from specattn.decoding import Target, Vegas
from specattn.decoding.engine import snapshot
from specattn.decoding.engine.snapshot import PromptSnapshot
from tests.decoding.models import prompts, tiny_model

CONTEXT, NEW_TOKENS, GAMMA, LAYERS, HEADS = 3000, 12, 3, 3, 4
NODES = CONTEXT + NEW_TOKENS + GAMMA + 1


class Allocations(TorchDispatchMode):
    """Notes shape and bytes of every tensor that is made anew."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        there = {memory_of(x) for x in tree_flatten((arguments, options))[0] if is_tensor(x)}
        for x in tree_flatten(result)[0]:
            if is_tensor(x) and memory_of(x) not in there:
                self.made.append((tuple(x.shape), x.untyped_storage().nbytes()))
        return result


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


def growing(monkeypatch, **options):
    """Count by shape and bytes what a run of decoding makes that is as long as the context."""
    allocations, run_rounds = Allocations(), snapshot.run_rounds

    def watched(*arguments, **named):
        with allocations:
            return run_rounds(*arguments, **named)

    monkeypatch.setattr(snapshot, "run_rounds", watched)
    model = tiny_model(max_position_embeddings=8192)
    target = Target(model, 1, NODES)
    prompt = PromptSnapshot(target, prompts([CONTEXT]))
    method = Vegas(gamma=GAMMA, ratio=1e-6, min_tokens=40, switch=False, **options)
    _, statistics = prompt.run(method, NEW_TOKENS, LogitsProcessorList(), do_sample=False, seed=0)
    assert statistics.total.drafted > 0
    assert len(allocations.made) > 100
    return Counter((shape, size) for shape, size in allocations.made if size >= CONTEXT)


def test_only_scores_grow_with_the_context(monkeypatch):
    made = growing(monkeypatch)
    assert {shape for shape, _ in made} == {(LAYERS, 1, NODES)}
    assert max(size for _, size in made) == 4 * LAYERS * NODES


def test_weights_take_one_layers_logits(monkeypatch):
    made = growing(monkeypatch, ranking="weight")
    assert (1, 2, HEADS, NODES) in {shape for shape, _ in made}
    assert max(size for _, size in made) == 4 * 2 * HEADS * NODES


@pytest.mark.parametrize("ranking", ["logit", "weight"])
def test_the_last_accepted_row_takes_scores_of_every_row(monkeypatch, ranking):
    made = growing(monkeypatch, ranking=ranking, rows="last")
    assert max(size for _, size in made) == 4 * (GAMMA + 1) * max(LAYERS, HEADS) * NODES
