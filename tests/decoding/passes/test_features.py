"""Features of layers: passes hand out the residual stream behind them, in every way to run one."""

import pytest
import torch

from specattn.decoding.engine.target import Target
from specattn.decoding.passes.attention import HEAD
from specattn.decoding.passes.graphs import GraphRunner
from specattn.tree import Tree
from tests.decoding.models import CONFIGS, is_recorded, prompts, tiny_model
from tests.decoding.tape import TapeGraph

LENGTHS = [9, 5, 19]
TREES = {"tree": Tree([-1, 0, 0, 1, 1, 2]), "chain": Tree.chain(3)}
LAYERS = (2, HEAD, 1, 3)
WAYS = ("modules", "recorded", "captured")


def target_of(model, way):
    target = Target(model, len(LENGTHS), 48, "on" if way == "recorded" else "off")
    if way == "captured":
        target.runner = GraphRunner(model, lambda: TapeGraph)
    return target


@torch.no_grad()
def streams(model, ids):
    """Return the features [L, H * layers] of a text, from the inputs of the model's modules."""
    taken, base = {}, model.base_model
    places = dict(enumerate([*base.layers, base.norm]))
    hooks = [
        module.register_forward_pre_hook(
            lambda _, given, kwargs, n=n: taken.update({n: [*given, *kwargs.values()][0][0]}),
            with_kwargs=True,
        )
        for n, module in places.items()
    ]
    taken[HEAD] = base(ids[None], use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return torch.cat([taken[n] for n in LAYERS], -1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", [name for name in CONFIGS if "-" not in name])
def test_a_pass_hands_out_the_stream_behind_layers(family, way):
    """Of the prompts, in ragged chunks, and of trees and chains behind them."""
    model, texts = tiny_model(family), prompts(LENGTHS)
    target, chunks = target_of(model, way), []
    target.hand_out(LAYERS)
    with torch.no_grad():
        target.prefill(texts, 8, on_features=lambda _, rows: chunks.append(rows))
        for row, text in enumerate(texts):
            found = torch.cat([chunk[row] for chunk in chunks])
            torch.testing.assert_close(found, streams(model, text), rtol=1e-4, atol=1e-4)
        for seed, tree in enumerate([*TREES.values(), *TREES.values()]):
            tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=seed))
            found = target.verify(tree, tokens, reuse_buffers=True).features
            for row, text in enumerate(texts):
                for node in range(tree.size):
                    path = [n for n in range(node + 1) if tree.mask[node, n]]
                    expected = streams(model, torch.cat([text, tokens[row, path]]))[-1]
                    torch.testing.assert_close(found[row, node], expected, rtol=1e-4, atol=1e-4)


def test_other_calls_of_the_model_are_left_alone():
    model = tiny_model("qwen3")
    (ids,) = prompts([12])
    with torch.no_grad():
        before = model(ids[None]).logits
        target = target_of(model, "modules")
        target.hand_out(LAYERS)
        target.hand_out(LAYERS)
        hooks = [len(layer._forward_hooks) for layer in model.base_model.layers]
        assert torch.equal(model(ids[None]).logits, before)
    assert hooks == [1, 1, 1]


def test_what_is_handed_out_may_change_between_passes():
    """A recording is of one kind of features."""
    model, tree = tiny_model("llama"), TREES["chain"]
    target, found = target_of(model, "recorded"), {}
    tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=1))
    for layers in ((HEAD,), (1,), (1, 2), (HEAD,), (2,), (1, 2)):
        target.hand_out(layers)
        with torch.no_grad():
            features = target.verify(tree, tokens).features
        assert features.shape[-1] == 32 * len(layers)
        assert torch.equal(features, found.setdefault(layers, features))
    assert torch.equal(torch.cat([found[1,], found[2,]], -1), found[1, 2])


def test_a_model_that_has_handed_out_features_is_recorded_as_before():
    """What reads them stays at its layers, where any other hook would rule the recording out."""
    model = tiny_model("qwen3")
    target_of(model, "modules").hand_out(LAYERS)
    assert is_recorded(target_of(model, "recorded"))
    model.base_model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="layers.1 has forward hooks"):
        target_of(model, "recorded")
