"""Models that were loaded with FlashAttention: decoded by ours, and by it in all other calls."""

import pytest
from transformers import AttentionInterface

from specattn.decoding import generate
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

NAMES = ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding"])
def test_the_model_is_decoded_and_keeps_its_own_attention(name, family, monkeypatch):
    """transformers refuses names like it that it cannot load; its adapter asks the layer's name."""
    model, (text,) = tiny_model(family), prompts([9])
    expected, asked = greedy_by_transformers(model, text, 6), []
    by_torch = AttentionInterface()["sdpa"]

    def flash(module, *tensors, **options):
        asked.append((module.config._attn_implementation, module.layer_idx))
        return by_torch(module, *tensors, **options)

    known = AttentionInterface._global_mapping
    monkeypatch.setattr(AttentionInterface, "_global_mapping", {**known, name: flash})
    model.config._attn_implementation = name
    for _ in range(2):
        assert generate(model, [text], "plain", max_new_tokens=6).new_tokens == [expected]
    assert asked == []
    assert greedy_by_transformers(model, text, 6) == expected
    layers = model.config.num_hidden_layers
    assert asked[:layers] == [(name, layer) for layer in range(layers)]
