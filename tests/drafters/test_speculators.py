"""The `speculators` layout of EAGLE: what is written, against transformers' own Llama layer."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specattn.drafters import PosSDrafter, load_speculators, save_speculators
from tests.decoding.models import tiny_model
from tests.drafters.poss_statement import random_drafter

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def eagle(**options):
    return random_drafter(tiny_model("llama", **options), layers=1, dtype=torch.float32)


@pytest.mark.parametrize("rope", [None, LLAMA_3], ids=["plain-rope", "llama3-rope"])
def test_the_layer_is_transformers_own(tmp_path, rope):
    """Built from the files alone, as the layout says: no input norm, no norm before the head."""
    drafter = eagle(**({"rope_parameters": rope} if rope else {}))
    save_speculators(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    llama = LlamaConfig(**config["transformer_layer_config"], attn_implementation="eager")
    layer = LlamaDecoderLayer(llama, 0)
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(
        {n.removeprefix("transformer."): w for n, w in weights.items() if "transformer" in n}
    )
    embeds, features = torch.randn(2, 1, 7, llama.hidden_size)
    with torch.no_grad():
        (expected,) = drafter(embeds, features, 1)
        x = torch.cat([embeds[:, 1:], features[:, :-1]], -1) @ weights["fusion_fc.weight"].T
        rotation = LlamaRotaryEmbedding(llama)(x, torch.arange(6)[None])
        hidden = torch.full((6, 6), -torch.inf).triu(1)[None, None]
        out = layer(x, attention_mask=hidden, position_embeddings=rotation)
    torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, expected)


def test_what_was_written_is_read(tmp_path):
    drafter = eagle().bfloat16()
    drafter.config.target = "meta-llama/Llama-3.1-8B-Instruct"
    save_speculators(drafter, tmp_path, speculative_tokens=7)
    again = load_speculators(tmp_path)
    assert again.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert again.dtype == torch.bfloat16
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    assert load_speculators(tmp_path, dtype=torch.float32).dtype == torch.float32
    stated = json.loads((tmp_path / "config.json").read_text())["speculators_config"]
    assert stated["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 7}]


def test_a_fusion_bias_is_kept(tmp_path):
    config = eagle().config
    config.fc_bias = True
    drafter = PosSDrafter(config)
    torch.nn.init.normal_(drafter.fc.bias)
    save_speculators(drafter, tmp_path)
    assert torch.equal(load_speculators(tmp_path).fc.bias, drafter.fc.bias)


@pytest.mark.parametrize(
    ("family", "options", "what"),
    [
        ("llama", {"layers": 2}, "2 specialists"),
        ("qwen3", {}, "norms of queries and keys"),
        ("qwen2", {}, "biases of queries, keys and values"),
        ("llama", {"fc_norm": True}, r"a norm of features before fc \(fc_norm\)"),
        ("llama", {"norm_output": True}, r"a norm of drafted features \(norm_output\)"),
    ],
)
def test_what_has_no_place_is_refused(tmp_path, family, options, what):
    drafter = random_drafter(tiny_model(family), **{"layers": 1} | options)
    with pytest.raises(ValueError, match=f"has no place for {what}"):
        save_speculators(drafter, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "EAGLE-3 drafter, which reads three layers"),
        ({"speculators_model_type": None}, "expected speculators_model_type 'eagle'.*got None"),
        ({"layernorms": True}, "layernorms must be False, got True"),
        ({"fc_norm": True}, "fc_norm must be False, got True"),
        ({"norm_output": True}, "norm_output must be False, got True"),
        ({"transformer_layer_architecture": "X"}, "must be 'LlamaDecoderLayer'.*got 'X'"),
        ({"fusion_bias": True}, "missing or unexpected fusion_fc.bias"),
    ],
)
def test_other_drafters_are_refused(tmp_path, change, message):
    save_speculators(eagle(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        load_speculators(tmp_path)


def test_files_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no readable config.json"):
        load_speculators(tmp_path)
    save_speculators(eagle(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"lm_head.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="missing or unexpected lm_head.weight"):
        load_speculators(tmp_path)
    weights["fusion_fc.weight"] = torch.ones(2, 2)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit its config.json"):
        load_speculators(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="no model.safetensors but pytorch_model.bin; other form"):
        load_speculators(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        load_speculators(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no readable config.json"):
        load_speculators(tmp_path)
