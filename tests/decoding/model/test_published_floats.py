"""Checkpoints in floats of 8 bits: texts are transformers' own, of the weights that they mean."""

import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from specattn.decoding import Target, generate
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.decoding.model.quantised import QuantisedLinear
from tests.decoding.model.test_published import broken, without
from tests.decoding.models import greedy_by_transformers, is_recorded, prompts, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.* asks for activations of 8 bits")


def float8(block, settings, names=("weight", "weight_scale_inv"), dtype=torch.float32):
    """Write a model of floats of 8 bits; `block` is [rows, K] of a scale, or "row" or "tensor"."""

    def publish_float8(folder, change=None):
        model = tiny_model("qwen3", hidden_size=160, intermediate_size=200)
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name, module in model.named_modules():
            if not name.endswith("_proj"):
                continue
            weight = module.weight.detach()
            rows, depth = weight.shape
            shape = {"row": (1, depth), "tensor": (rows, depth)}.get(block, block)
            scale = torch.zeros(-(-rows // shape[0]), -(-depth // shape[1]), dtype=dtype)
            codes = torch.zeros(rows, depth, dtype=torch.float8_e4m3fn)
            with torch.no_grad():
                for i, j in torch.cartesian_prod(*map(torch.arange, scale.shape)).tolist():
                    at = tuple(slice(n * size, (n + 1) * size) for n, size in zip((i, j), shape))  # noqa: B905
                    scale[i, j] = weight[at].abs().max() / 448
                    codes[at] = (weight[at] / scale[i, j].float()).to(codes.dtype)
                    module.weight[at] = codes[at].float() * scale[i, j].float()
            if block == "tensor":
                scale = scale[0, 0].clone()
            packed = dict(zip(names, (codes, scale), strict=True))
            packed["input_scale"] = torch.tensor(0.5)
            if change is not None:
                change(packed)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": x for part, x in packed.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = settings
        (folder / "config.json").write_text(json.dumps(config))
        return model

    return publish_float8


def compressed_floats(strategy, block=None, activations=None):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights |= {"block_structure": block}
    group = {"weights": weights, "targets": ["Linear"], "input_activations": activations}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return settings | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
GROUPS = DYNAMIC | {"strategy": "group", "group_size": 128}
STATIC = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
SCALE = ("weight", "weight_scale")
FLOATS = {
    "blocks": float8((128, 128), BLOCKS | {"fmt": "e4m3"}),
    "tensor": float8("tensor", {"quant_method": "fp8", "activation_scheme": "static"}, SCALE),
    "compressed rows": float8(
        "row", compressed_floats("channel", activations=DYNAMIC), SCALE, torch.bfloat16
    ),
    "compressed tensor": float8("tensor", compressed_floats("tensor"), SCALE),
    "compressed blocks": float8((128, 128), compressed_floats("block", [128, 128]), SCALE),
    "compressed tensor, static": float8(
        "tensor", compressed_floats("tensor", activations=STATIC), SCALE
    ),
    "compressed groups of activations": float8(
        (128, 128), compressed_floats("block", [128, 128], GROUPS), SCALE
    ),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_text_is_that_of_the_weights_that_floats_mean(tmp_path, name):
    """Blocks end within rows and columns: 160 and 200 are no multiples of 128."""
    expected = FLOATS[name](tmp_path)
    model, (text,) = load_causal_model(tmp_path, torch.float32), prompts([20])
    for kind in ("mlp.down_proj", "mlp.gate_proj", "self_attn.k_proj"):
        found = model.model.layers[1].get_submodule(kind)
        assert type(found) is QuantisedLinear
        assert found.codes.dtype == torch.float8_e4m3fn
        whole = found.weight.dequantised(torch.float32)
        assert torch.equal(whole, expected.model.layers[1].get_submodule(kind).weight)
    assert is_recorded(Target(model, 1, 40))
    plain = greedy_by_transformers(expected, text, 16)
    for method in ("plain", "token_recycling"):
        assert generate(model, text, method, max_new_tokens=16, temperature=0).new_tokens == [plain]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("blocks", r"fp8 of .* asks for activations of 8 bits \(dynamic scales\): here they keep"),
        ("tensor", r"fp8 of .* asks for activations of 8 bits \(static scales\)"),
        (
            "compressed rows",
            r"compressed-tensors of .* 8 bits \(dynamic scales, strategy='token'\)",
        ),
        ("compressed groups of activations", r"\(dynamic scales, strategy='group'\)"),
        ("compressed tensor, static", r"\(static scales, strategy='tensor'\)"),
        ("compressed tensor", None),
    ],
)
def test_what_activations_are_to_be_is_named(tmp_path, name, asked):
    FLOATS[name](tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load_causal_model(tmp_path, torch.float32)
    texts = [str(x.message) for x in said if "activations" in str(x.message)]
    assert len(texts) == (asked is not None)
    assert asked is None or re.search(asked, texts[0])


def experts(folder, fused):
    """Write a mixture of experts in fp8: of each expert three layers, or all as one tensor."""
    model = tiny_model("qwen3_moe")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if fused:
        kept = {key: x for key, x in tensors.items() if ".experts." not in key}
        tensors = kept | {key: x for key, x in model.state_dict().items() if ".experts." in key}
    for key in [key for key in tensors if "_proj" in key]:
        scale = tensors[key].abs().amax() / 448
        tensors[key] = (tensors[key] / scale).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = scale.reshape([1] * tensors[key].dim())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = BLOCKS
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("fused", "reason"),
    [
        (False, r"model.layers.0.mlp.experts.0.\w+ is of fp8, and no linear layer of the model"),
        (True, r"model.layers.0.mlp.experts.\w+ of F8_E4M3 is no weight of a linear layer"),
    ],
)
def test_experts_of_fp8_are_named(tmp_path, fused, reason):
    """Those of one tensor were taken for numbers without their scales."""
    experts(tmp_path, fused)
    with pytest.raises(ValueError, match=reason):
        load_causal_model(tmp_path, "auto")


def not_a_number(packed):
    packed["weight"].view(torch.uint8)[2, 3] = 0xFF


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("blocks", not_a_number, r"1 of its \d+ weights are not numbers"),
        ("blocks", broken("weight_scale_inv", (0, 0)), r"\d+ of \d+ scales are not finite"),
        ("blocks", lambda x: x["weight_scale_inv"].zero_(), r"\d+ of \d+ scales are 0, of weights"),
        ("blocks", without("weight_scale_inv"), "it lacks 'weight_scale'"),
        (
            "blocks",
            lambda x: x.update(weight_scale_inv=torch.ones(9, 9)),
            r"expected scales \[\d, 2\], got \[9, 9\]",
        ),
        (
            "blocks",
            lambda x: x.update(weight=x["weight"].float().to(torch.float8_e5m2)),
            "expected weights of torch.float8_e4m3fn, got torch.float8_e5m2",
        ),
        (
            "compressed rows",
            lambda x: x.update(weight_scale=torch.ones(3, 1)),
            r"expected 1 or \d+ scales, got \[3, 1\]",
        ),
    ],
)
def test_floats_that_do_not_fit_are_named(tmp_path, name, change, reason):
    FLOATS[name](tmp_path, change)
    message = rf"the weights in {tmp_path} cannot be read: model.layers.0.\w+.\w+: {reason}"
    with pytest.raises(ValueError, match=message):
        load_causal_model(tmp_path, "auto")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (BLOCKS | {"weight_block_size": [1, 32]}, r"fp8 with scales for \[1, 32\] weights is not"),
        (BLOCKS | {"activation_scheme": "odd"}, "fp8 with activation_scheme='odd' is not read"),
        (
            compressed_floats("channel", activations={"num_bits": 8, "type": "int"}),
            "compressed-tensors of activations with type='int' is not read here, but with 'float'",
        ),
    ],
)
def test_other_floats_are_named(tmp_path, settings, reason):
    float8("row", settings)(tmp_path)
    with pytest.raises(ValueError, match=reason):
        load_causal_model(tmp_path, "auto")
