"""Weights that torchao holds in 8 bits: their texts are transformers' own, of the same weights."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from specattn.decoding import Target, generate, prove
from specattn.decoding.model.checkpoint import load_causal_model
from tests.decoding.models import greedy_by_transformers, is_recorded, prompts, tiny_model
from tests.decoding.test_greedy import METHODS

NEW_TOKENS = 16


def quantised(folder, dtype):
    """Return a model that was saved with its linear layers quantised, and loaded."""
    quantization = pytest.importorskip("torchao.quantization")
    tiny_model("qwen3").to(dtype).save_pretrained(folder / "whole")
    AutoModelForCausalLM.from_pretrained(
        folder / "whole",
        dtype=dtype,
        quantization_config=TorchAoConfig(quantization.Int8WeightOnlyConfig()),
    ).save_pretrained(folder / "int8")
    model = load_causal_model(folder / "int8", "auto")
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    assert model.dtype == dtype
    return model


@pytest.mark.parametrize("method", ["plain", "vegas", "token_recycling"])
def test_a_quantised_model_equals_transformers(tmp_path, method):
    model, texts = quantised(tmp_path, torch.float32), prompts([5, 23])
    with pytest.warns(UserWarning, match="its weights are a Int8Tensor"):
        assert not is_recorded(Target(model, 1, 8))
    output = generate(model, texts, METHODS[method], max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == [greedy_by_transformers(model, p, NEW_TOKENS) for p in texts]


def test_one_in_bfloat16_agrees_with_itself(tmp_path):
    """As far as the dtype goes: there texts may part at a near-tie."""
    prove(quantised(tmp_path, torch.bfloat16))


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq", "quant_config": {"nbits": 4, "group_size": 64}}, "hqq"),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else "",
)
def test_what_cannot_be_read_names_the_missing_package(tmp_path, settings, package):
    if package in sys.modules:
        pytest.skip(f"{package} is installed: nothing is missing")
    model = tiny_model("qwen3")
    model.config.quantization_config = settings
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"the weights in .* cannot be loaded: .*({package})"):
        load_causal_model(tmp_path, "auto")
