"""The attention function that transformers calls: what it forwards, and what it refuses by name."""

import pytest
import torch

from specattn.decoding import Target
from specattn.decoding.passes import interface
from specattn.tree import Tree
from tests.decoding.models import prompts, tiny_model


def verify(model, **options):
    """Run a verification in which layers hand `options` to the attention function."""
    inner = interface.attention
    (text,) = prompts([9])
    target = Target(model, batch=1, capacity=20, compile="off")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(interface, "attention", lambda *a, **given: inner(*a, **given, **options))
        target.prefill([text], chunk_size=64)
        return target.verify(Tree.chain(2), torch.tensor([[3, 4, 5]])).logits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": 0.5, "bias": 1}, "layer 0: alibi_slopes, bias cannot be served"),
        ({"dropout": 0.1}, r"layers.0.self_attn computes at random \(attention_dropout=0.1\)"),
        ({"sliding_window": 5}, "layer 0: sliding_window=5 is not .* None"),
    ],
)
def test_what_is_not_served_is_refused_by_name(options, message):
    model = tiny_model("llama")  # whose layers hand down no window
    if "dropout" in options:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = options["dropout"]
        model.train()
        options = {}
    with pytest.raises(ValueError, match=message):
        verify(model, **options)


def test_a_softcap_reaches_the_kernels():
    model = tiny_model("llama", peak=1.0)
    plain, capped = verify(model), verify(model, softcap=0.5)
    assert (plain - capped).abs().max() > 1e-3
    torch.testing.assert_close(verify(model, softcap=1e6), plain, rtol=1e-3, atol=1e-3)
