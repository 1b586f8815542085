"""EAGLE-3's drafter: its equations along whole texts, and the folders that others publish."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specattn.blocks import TORCH
from specattn.drafters import Eagle3Config, Eagle3Drafter
from specattn.drafters.eagle3 import logits_of
from tests.decoding.models import CONFIGS, tiny_model
from tests.drafters.eagle3_statement import NORMS, Statement, random_drafter

ROWS, LENGTH, DEPTH = 2, 9, 5


def text(drafter, seed=3):
    """Return random embeddings and features of `ROWS` texts."""
    generator = torch.Generator().manual_seed(seed)
    width = drafter.config.hidden_size
    draw = {"generator": generator, "dtype": torch.float64}
    embeddings = torch.randn(ROWS, LENGTH, width, **draw)
    return embeddings, torch.randn(ROWS, LENGTH, width * drafter.config.features, **draw)


def check(drafter, rotary):
    """Compare hidden states and logits behind every root with the statement's."""
    embeddings, features = text(drafter)
    statement = Statement(drafter, rotary)
    with torch.no_grad():
        outs = drafter(embeddings, features, DEPTH)
        logits = [logits_of(TORCH, drafter, x) for x in outs]
    for row, (e, f) in enumerate(zip(embeddings, features, strict=True)):
        for root in range(1, LENGTH):
            path = e[root + 1 : root + DEPTH]
            for depth, x in enumerate(statement.drafted(e[: root + 1], f[:root], path)):
                found = outs[depth][row, root - 1], logits[depth][row, root - 1]
                torch.testing.assert_close(found, (x, statement.logits(x)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", [name for name in CONFIGS if "-" not in name])
def test_training_mode_is_the_statement(family):
    """Every family's heads: with norms and biases and without, and with the target's own rope."""
    model = tiny_model(family)
    check(random_drafter(model), model.base_model.rotary_emb)


@pytest.mark.parametrize("norms", NORMS.values(), ids=NORMS)
def test_every_norm_in_training_mode(norms):
    model = tiny_model("qwen3")
    check(random_drafter(model, layers=(2, 2, 3, 1), tokens=20, **norms), model.model.rotary_emb)


def test_later_text_is_invisible():
    drafter = random_drafter(tiny_model("llama"))
    embeddings, features = text(drafter)
    with torch.no_grad():
        before = drafter(embeddings, features, DEPTH)
        embeddings[:, 5:] += 100.0
        features[:, 5:] *= -100.0
        after = drafter(embeddings, features, DEPTH)
    for depth, (x, y) in enumerate(zip(before, after, strict=True)):
        kept = max(4 - depth, 0)
        assert torch.equal(x[:, :kept], y[:, :kept])
        assert not torch.equal(x[:, kept], y[:, kept])


def config_of(drafter):
    """Return what a Llama's config.json says of the drafter's layer."""
    own = drafter.config
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    found = {name: getattr(own, name) for name in names}
    return {**found, "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}


def publish(folder, drafter, layout, embedding=None):
    """Write a folder as others do; return its config."""
    own, size = drafter.config, drafter.config.vocab_size
    weights = {n: x.detach().clone() for n, x in drafter.state_dict().items()}
    if drafter.tokens is None:
        weights["d2t"] = torch.zeros(size, dtype=torch.int64)
    weights["t2d"] = torch.zeros(size, dtype=torch.bool)
    weights["t2d"][slice(None) if drafter.tokens is None else drafter.tokens] = True
    if embedding is not None:
        weights["embed_tokens.weight"] = embedding.detach().clone()
    flags = {n: True for n in ("fc_norm", "norm_output", "norm_before_residual") if getattr(own, n)}
    common = {"draft_vocab_size": own.head_size, **flags}
    layers = own.feature_layers
    if layout == "speculators":
        weights = {n.replace("midlayer.", "layers.0."): x for n, x in weights.items()}
        weights["verifier_norm.weight"] = weights["norm.weight"].clone()
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
            "transformer_layer_config": config_of(drafter),
            "eagle_aux_hidden_state_layer_ids": layers,
            "norm_before_residual": False,
            **common,
        }
    else:
        config = {**config_of(drafter), "architectures": ["LlamaForCausalLM"], **common}
        if layout == "sglang":
            config["architectures"] = ["LlamaForCausalLMEagle3"]
            ids = None if layers is None else [n - 1 for n in layers]
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")
    return config


@pytest.mark.parametrize("tokens", [None, 24], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    ("layout", "layers", "norms"),
    [
        ("safeailab", None, {}),
        ("sglang", None, {"fc_norm": True, "norm_output": True}),
        ("sglang", [2, 3, 4], {}),
        ("speculators", None, {"norm_before_residual": True}),
        ("speculators", [1, 3, 4], {}),
    ],
)
def test_published_folders_hold_the_drafter(tmp_path, layout, layers, norms, tokens):
    model = tiny_model("llama", num_hidden_layers=6)
    drafter = random_drafter(model, tokens=tokens, dtype=torch.float32, **norms)
    drafter.config.feature_layers = layers
    publish(tmp_path, drafter, layout)
    loaded = Eagle3Drafter.from_pretrained(tmp_path)
    assert loaded.config.layers_of(model.config) == tuple(layers or (2, 3, 3))
    loaded.config.check_target(model.config)
    inputs = [x.float() for x in text(drafter)]
    with torch.no_grad():
        torch.testing.assert_close(loaded(*inputs, 3), drafter(*inputs, 3))
        hidden = inputs[0]
        found, right = (logits_of(TORCH, one, hidden) for one in (loaded, drafter))
    torch.testing.assert_close(found, right)
    if tokens is not None:
        assert torch.equal(loaded.tokens, drafter.tokens)
    assert Eagle3Drafter.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_an_embedding_of_its_own_is_kept(tmp_path):
    model = tiny_model("llama")
    drafter = random_drafter(model, dtype=torch.float32)
    publish(tmp_path, drafter, "sglang", embedding=model.get_input_embeddings().weight)
    loaded = Eagle3Drafter.from_pretrained(tmp_path)
    assert loaded.config.own_embedding
    assert torch.equal(loaded.embed_tokens.weight, model.get_input_embeddings().weight)


def test_our_own_folder(tmp_path):
    model = tiny_model("qwen3")
    drafter = random_drafter(model, tokens=24, dtype=torch.float32)
    drafter.save_pretrained(tmp_path)
    loaded = Eagle3Drafter.from_pretrained(tmp_path)
    for name, saved in drafter.state_dict().items():
        assert torch.equal(saved, loaded.state_dict()[name]), name
    assert loaded.config.feature_layers == [1, 2, 3]
    assert not any("embed" in name for name in load_file(tmp_path / "model.safetensors"))


def test_a_target_that_does_not_fit_is_refused_with_both_numbers():
    config = random_drafter(tiny_model("llama")).config
    for own, message in (
        ({"hidden_size": 64}, "hidden_size is 32, the target's is 64"),
        ({"vocab_size": 95}, "vocab_size is 96, the target's is 95"),
        ({"num_hidden_layers": 2}, "deepest layer is 3, the target's is 2"),
    ):
        with pytest.raises(ValueError, match=message):
            config.check_target(tiny_model("llama", **own).config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"draft_vocab_size": None}, "a model of 'LlamaForCausalLM', not an EAGLE-3 drafter"),
        ({"speculators_model_type": "eagle"}, "speculators' 'eagle', not an EAGLE-3 drafter"),
        ({"fc_norm": True}, "missing keys fc_norm.0.weight"),
        ({"intermediate_size": 40}, r"mlp.down_proj.weight is \[32, 48\], expected \[32, 40\]"),
        ({"draft_vocab_size": 20}, r"d2t is \[24\], expected \[20\]"),
    ],
    ids=str,
)
def test_folders_that_hold_something_else_are_refused(tmp_path, change, message):
    drafter = random_drafter(tiny_model("llama"), tokens=24, dtype=torch.float32)
    config = publish(tmp_path, drafter, "safeailab")
    changed = {k: v for k, v in {**config, **change}.items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Eagle3Drafter.from_pretrained(tmp_path)


def test_weights_that_contradict_themselves_are_refused(tmp_path):
    drafter = random_drafter(tiny_model("llama"), tokens=24, dtype=torch.float32)
    publish(tmp_path, drafter, "safeailab")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({**weights, "t2d": ~weights["t2d"]}, path)
    with pytest.raises(ValueError, match="t2d has 72 tokens, which are not the 24 of d2t"):
        Eagle3Drafter.from_pretrained(tmp_path)
    save_file({**weights, "d2t": weights["d2t"] + 90}, path)
    with pytest.raises(ValueError, match="of a vocabulary of 96"):
        Eagle3Drafter.from_pretrained(tmp_path)
    save_file({n: x for n, x in weights.items() if n != "d2t"}, path)
    with pytest.raises(ValueError, match="a head of 24 of 96 tokens needs d2t"):
        Eagle3Drafter.from_pretrained(tmp_path)
    path.unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="but pytorch_model.bin; other formats are not loaded"):
        Eagle3Drafter.from_pretrained(tmp_path)


def test_configurations_that_are_none():
    for given, message in (
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"feature_layers": [0, 1]}, "feature_layers must be positive"),
        ({"draft_vocab_size": 5000}, "draft_vocab_size must be from 1 to 4096, got 5000"),
        ({"target_hidden_size": 512}, "width 256 cannot read the embedding of a target of width"),
    ):
        with pytest.raises(ValueError, match=message):
            Eagle3Config(**given)
