"""Checkpoints whose layers were rounded once: a run has the texts of one that rounds by itself.

`tests/integrations/vllm/test_stored.py` lets vLLM and transformers read them.
"""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from specattn.decoding import generate
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.decoding.model.quantised import QUANTIZE, QuantisedLinear, quantised
from specattn.decoding.model.store import store_rounded
from tests.decoding.models import prompts, tiny_model
from tests.forks import fork

WHOLE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4}
MIXED = {"intermediate_size": 100}  # down_proj has one group in a row of 100


def stored(folder, kind, family="qwen3", dtype=torch.bfloat16, **sizes):
    model = tiny_model(family, **{**WHOLE, **sizes}).to(dtype)
    model.save_pretrained(folder / "whole", max_shard_size="100KB")
    found = store_rounded(folder / "whole", folder / "few", kind)
    assert {file.name for file in folder.iterdir()} == {"whole", "few"}
    return found


def texts(model, **options):
    options = {"max_new_tokens": 16, "temperature": 0, **options}
    return generate(model, prompts([20, 7]), "plain", **options).new_tokens


@pytest.mark.parametrize("sizes", [{}, MIXED], ids=["groups", "groups and rows"])
@pytest.mark.parametrize("kind", QUANTIZE)
def test_texts_are_those_of_a_run_that_rounds(tmp_path, kind, sizes):
    found = stored(tmp_path, kind, **sizes)
    for dtype in (torch.float32, torch.bfloat16):
        whole, few = (load_causal_model(tmp_path / name, dtype) for name in ("whole", "few"))
        rounded = quantised(whole, kind)
        layers = [n for n, x in few.named_modules() if type(x) is QuantisedLinear]
        assert len(layers) == found.layers == 7 * few.config.num_hidden_layers
        for name in layers:
            ours, own = few.get_submodule(name), rounded.get_submodule(name)
            assert torch.equal(ours.codes.view(torch.uint8), own.codes.view(torch.uint8))
            assert torch.equal(ours.scale, own.scale)
            assert ours.zero is own.zero is None
        assert texts(few) == texts(whole, quantize=kind)


def test_what_it_says_of_sizes(tmp_path):
    found = stored(tmp_path, "int4")
    files = {name: [*(tmp_path / name).glob("*.safetensors")] for name in ("whole", "few")}
    weights = {name: [load_file(x) for x in those] for name, those in files.items()}
    size = {
        n: sum(x.nbytes for each in those for x in each.values()) for n, those in weights.items()
    }
    assert (found.before, found.after) == (size["whole"], size["few"])
    assert found.before - found.layers_before == found.after - found.layers_after
    index = json.loads((tmp_path / "few" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == found.after
    assert len(files["few"]) > 1
    assert {key: file.name for file in files["few"] for key in load_file(file)} == index[
        "weight_map"
    ]


@pytest.mark.parametrize(
    ("kind", "form", "scheme"),
    [
        ("int4", "pack-quantized", {"num_bits": 4, "type": "int", "group_size": 64}),
        ("int8", "pack-quantized", {"num_bits": 8, "type": "int", "group_size": 64}),
        ("fp8", "float-quantized", {"num_bits": 8, "type": "float", "group_size": None}),
    ],
)
def test_what_others_read(tmp_path, kind, form, scheme):
    """As compressed-tensors has it: format, one group of all linear layers but those left out."""
    stored(tmp_path, kind)
    config = json.loads((tmp_path / "few" / "config.json").read_bytes())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == form
    assert config["ignore"] == ["lm_head"]
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["input_activations"] is None
    strategy = "channel" if kind == "fp8" else "group"
    expected = scheme | {"strategy": strategy, "symmetric": True, "dynamic": False}
    assert group["weights"] == expected


def test_layers_of_two_kinds_are_named(tmp_path):
    stored(tmp_path, "int4", **MIXED)
    config = json.loads((tmp_path / "few" / "config.json").read_bytes())["quantization_config"]
    strategies = {x["weights"]["strategy"]: x["targets"] for x in config["config_groups"].values()}
    assert set(strategies) == {"group", "channel"}
    assert all(name.endswith("down_proj") for name in strategies["channel"])
    assert "model.layers.0.self_attn.q_proj" in strategies["group"]


def test_other_files_come_along(tmp_path):
    model = tiny_model("qwen3", hidden_size=64, intermediate_size=128)
    model.save_pretrained(tmp_path / "whole")
    for name in ("tokenizer.json", "pytorch_model.bin", ".hidden"):
        (tmp_path / "whole" / name).write_text(name)
    for name, file in (("drafter", "config.json"), ("cache", "other")):
        (tmp_path / "whole" / name).mkdir()
        (tmp_path / "whole" / name / file).write_text("{}")
    store_rounded(tmp_path / "whole", tmp_path / "few", "int8")
    found = {path.name for path in (tmp_path / "few").iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    assert found == expected | {"tokenizer.json", "drafter"}


def test_what_is_refused(tmp_path):
    stored(tmp_path, "int4")
    whole, few, out = tmp_path / "whole", tmp_path / "few", tmp_path / "out"
    with pytest.raises(ValueError, match=rf"{few} exists, and is not replaced"):
        store_rounded(whole, few, "int8")
    with pytest.raises(ValueError, match=f"{few} has weights in few bits already, of compressed-"):
        store_rounded(few, out, "int4")
    file = next(x for x in sorted(whole.glob("*.safetensors")) if len(load_file(x)) > 1)
    tensors = load_file(file)
    layer = next(name for name in tensors if "_proj" in name)
    tensors[layer][0, 0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    name = layer.removesuffix(".weight")
    with pytest.raises(ValueError, match=f"{name}: weight: expected finite numbers"):
        store_rounded(whole, out, "int4")
    tensors[layer] = tensors[layer][:, :32].clone()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{layer}: expected shape \[\d+, \d+\], got \[\d+, 32\]"):
        store_rounded(whole, out, "int4")
    tensors[f"another.{layer}"] = tensors.pop(layer)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"has no weights by the names of 1 layers: {name}"):
        store_rounded(whole, out, "int4")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "few"}


def test_a_run_that_is_killed_leaves_no_model(tmp_path, monkeypatch):
    stored(tmp_path, "int8")
    whole, out = tmp_path / "whole", tmp_path / "out"
    killed = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    monkeypatch.setattr("specattn.decoding.model.store._copy_others", killed)
    with pytest.raises(AssertionError, match=f"status {-signal.SIGKILL}"):
        fork(lambda: store_rounded(whole, out, "int4"))
    monkeypatch.undo()
    assert not out.exists()
    with pytest.raises(ValueError, match="is of a run that was killed, or goes on: remove it"):
        store_rounded(whole, out, "int4")
