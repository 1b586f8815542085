"""LongSpec's drafter: its equations, and the folder it is saved to."""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specattn.drafters import LongSpecConfig, LongSpecDrafter
from tests.decoding.models import CONFIGS, tiny_model
from tests.drafters.statement import Statement, random_drafter

LENGTH = 19


def sequences(drafter, positions, *, seed=3):
    """Return random embeddings and target keys and values for each row of positions."""
    generator = torch.Generator().manual_seed(seed)
    config, rows = drafter.config, positions.shape
    cache = (*rows, config.num_key_value_heads, config.head_dim)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((*rows, config.hidden_size), cache, cache)
    ]


def stated(drafter, rotary, embeddings, positions, keys, values, shift):
    """Return what the statement says of every token of a batch, given the training's visibility."""
    statement, outs = Statement(drafter, rotary), []
    for x, at, k, v in zip(embeddings, positions.tolist(), keys, values, strict=True):
        for t, position in enumerate(at):
            earlier = list(zip(at[:t], x[:t], strict=True))
            seen = max(t - shift + 1, 0)
            outs.append(statement.token(x[t], position, earlier, k[:seen], v[:seen]))
    return torch.stack(outs).view_as(embeddings)


@pytest.mark.parametrize("family", CONFIGS)
def test_training_mode_is_the_statement(family):
    """Every family: with and without head norms and biases, and with the target's own rope."""
    model = tiny_model(family)
    drafter = random_drafter(model, window=6)
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) + 11])
    embeddings, keys, values = sequences(drafter, positions)
    with torch.no_grad():
        out = drafter(embeddings, positions, keys, values, shift=2)
    rotary = model.base_model.rotary_emb
    expected = stated(drafter, rotary, embeddings, positions, keys, values, 2)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def windows_and_shifts():
    """Yield all pairs; each window and each shift is quick once, and both extremes together."""
    windows, shifts = (1, 2, 5, LENGTH, 64), (0, 1, 4, LENGTH - 1)
    quick = {(1, 0), (2, 1), (5, 4), (LENGTH, LENGTH - 1), (64, 0), (1, LENGTH - 1)}
    for pair in product(windows, shifts):
        yield pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow)


@pytest.mark.parametrize(("window", "shift"), list(windows_and_shifts()))
def test_windows_and_shifts(window, shift):
    """Anchor-offset positions too: the window counts positions, so anchors are far away."""
    model = tiny_model("qwen2")
    drafter = random_drafter(model, window=window)
    offset = torch.arange(LENGTH)
    offset[4:] += 40
    positions = torch.stack([torch.arange(LENGTH), offset])
    embeddings, keys, values = sequences(drafter, positions)
    with torch.no_grad():
        out = drafter(embeddings, positions, keys, values, shift=shift)
    rotary = model.base_model.rotary_emb
    expected = stated(drafter, rotary, embeddings, positions, keys, values, shift)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_every_parameter_learns():
    drafter = random_drafter(tiny_model("qwen3"), window=5)
    positions = torch.arange(LENGTH)[None]
    embeddings, keys, values = sequences(drafter, positions)
    drafter(embeddings, positions, keys, values, shift=1).pow(3).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in drafter.parameters())


def test_a_new_drafter_has_the_norm_that_the_head_expects():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2)
    drafter = LongSpecDrafter.for_target(model, target="org/name", window=9)
    assert torch.equal(drafter.norm.weight, model.model.norm.weight)
    assert drafter.config.target == "org/name"
    assert drafter.config.window == 9


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_folder_keeps_everything(tmp_path, family):
    drafter = random_drafter(tiny_model(family), window=6)
    drafter.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    again = LongSpecDrafter.from_pretrained(tmp_path, dtype=torch.float64)
    again.save_pretrained(tmp_path / "again")
    texts = [(folder / "config.json").read_text() for folder in (tmp_path, tmp_path / "again")]
    assert texts[0] == texts[1]
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["target"] == "tiny"
    assert config["rope_parameters"] == tiny_model(family).config.rope_parameters


def test_embedding_and_head_stay_with_the_target():
    drafter = random_drafter(tiny_model("qwen3", vocab_size=1000), window=6)
    assert not any(1000 in weight.shape for weight in drafter.state_dict().values())


def test_the_configuration_is_written_whole(tmp_path):
    """Also where a value is the default."""
    LongSpecConfig(target="x").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {"window", "hidden_size", "head_dim", "qkv_bias", "qk_norm"} <= set(written)


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(folder, edit):
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no readable config.json"),
        (lambda f: (f / "config.json").write_text("{"), "no readable config.json"),
        (lambda f: edit_config(f, model_type="qwen3"), "type 'qwen3', not a LongSpec drafter"),
        (lambda f: edit_config(f, window=0), "window must be a positive integer, got 0"),
        (lambda f: edit_config(f, intermediate_size=40), "mismatched keys.*down_proj.weight"),
        (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
        (
            lambda f: edit_weights(f, lambda w: w.pop("norm.weight")),
            "missing keys norm.weight",
        ),
        (
            lambda f: edit_weights(f, lambda w: w.update(more=torch.ones(2))),
            "unexpected keys more",
        ),
        (lambda f: f.rename(f.with_name("gone")), "not a folder"),
    ],
)
def test_damaged_folders_are_named(tmp_path, damage, message):
    folder = tmp_path / "drafter"
    random_drafter(tiny_model("qwen3"), window=6).save_pretrained(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        LongSpecDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "its num_key_value_heads is 2, the target's is 4"),
        ({"head_dim": 8}, "its head_dim is 16, the target's is 8; it was trained for 'tiny'"),
        ({"vocab_size": 50}, "its vocab_size is 96, the target's is 50"),
        ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, "rope_parameters"),
    ],
)
def test_another_target_is_refused(changes, message):
    drafter = random_drafter(tiny_model("llama"), window=6)
    drafter.config.check_target(tiny_model("llama").config)
    with pytest.raises(ValueError, match=message):
        drafter.config.check_target(LlamaConfig(**tiny_model("llama").config.to_dict() | changes))


def test_ropes_that_turn_with_the_length_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="rope of type 'dynamic' is not supported"):
        LongSpecConfig(rope_parameters=rope)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shift": 19}, "shift: expected 0 to 18 for 19 tokens, got 19"),
        ({"shift": -1}, "shift"),
        ({"inputs_embeds": torch.zeros(2, LENGTH, 31)}, "inputs_embeds: expected shape"),
        ({"position_ids": torch.arange(LENGTH)}, "position_ids: expected shape"),
        ({"target_keys": torch.zeros(2, LENGTH, 4, 16)}, "target_keys: expected shape"),
        ({"target_values": torch.zeros(2, 3, 2, 16)}, "target_values: expected shape"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    drafter = random_drafter(tiny_model("qwen3"), window=6)
    positions = torch.arange(LENGTH).expand(2, -1)
    embeddings, keys, values = sequences(drafter, positions)
    arguments = {
        "inputs_embeds": embeddings,
        "position_ids": positions,
        "target_keys": keys,
        "target_values": values,
        "shift": 1,
    }
    with pytest.raises(ValueError, match=message):
        drafter(**arguments | changes)
