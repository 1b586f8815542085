"""Checkpoints as they are published in 4 and 8 bits: their texts are transformers' own, of the
weights that they mean."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from specattn.decoding import Target, generate
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.decoding.model.quantised import QuantisedLinear
from tests.decoding.models import greedy_by_transformers, is_recorded, prompts, tiny_model

K_HEADS = {"hidden_size": 64, "intermediate_size": 128}
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns of a word, from its lowest bits on


def words(values, bits, columns=None):
    """Return integers [A, B] in words of 32 bits along B, written out."""
    columns = columns or range(32 // bits)
    packed = torch.zeros(len(values), values.shape[1] // len(columns), dtype=torch.int64)
    for place, column in enumerate(columns):
        packed |= values[:, column :: len(columns)].long() << bits * place
    return packed.to(torch.int32)


class Published:
    """A method: how `pack` stores codes [N, K] and zeros [N, G] from 0 on, and scales [N, G]."""

    def __init__(self, bits, group, zeros, settings, pack):
        self.bits, self.group, self.zeros = bits, group, zeros
        self.settings, self.pack = settings, pack


def gptq(bits, group, zeros, form="gptq"):
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False}
    settings |= {"sym": not zeros, "checkpoint_format": form}

    def pack(codes, scale, zero):
        size = codes.shape[1] // scale.shape[1]
        return {
            "qweight": words(codes, bits).t().contiguous(),
            "qzeros": words((zero.t() - int(form == "gptq")) % 2**bits, bits),
            "scales": scale.t().half().contiguous(),
            "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // size,
        }

    return Published(bits, group, zeros, settings, pack)


def awq(group):
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}

    def pack(codes, scale, zero):
        return {
            "qweight": words(codes.t(), 4, AWQ_PLACES),
            "qzeros": words(zero.t(), 4, AWQ_PLACES),
            "scales": scale.t().half().contiguous(),
        }

    return Published(4, group, True, settings | {"version": "gemm"}, pack)


def compressed(bits, group, zeros):
    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros}
    weights |= {"strategy": "group" if group else "channel", "group_size": group}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"], "input_activations": None}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    settings |= {"config_groups": groups, "ignore": ["lm_head"]}

    def pack(codes, scale, zero):
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scale.half(),
            "weight_shape": torch.tensor(codes.shape),
        }
        if zeros:
            tensors["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
        return tensors

    return Published(bits, group, zeros, settings, pack)


def auto_round(like):
    """How AutoRound packs: as another method does."""
    settings = {"quant_method": "auto-round", "bits": like.bits, "group_size": like.group}
    settings |= {"packing_format": f"auto_round:auto_{like.settings['quant_method']}"}
    settings |= {"data_type": "int", "sym": not like.zeros}
    return Published(like.bits, like.group, like.zeros, settings, like.pack)


def bitsandbytes():
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}

    def pack(codes, scale, zero):
        codes = (codes - 128).to(torch.int8)
        form = torch.tensor(0, dtype=torch.uint8)
        return {"weight": codes, "SCB": scale[:, 0] * 127, "weight_format": form}

    return Published(8, None, False, settings, pack)


METHODS = {
    "gptq-4": gptq(4, 32, False),
    "gptq-4-zeros": gptq(4, 64, True),
    "gptq-v2-4": gptq(4, 32, True, "gptq_v2"),
    "gptq-8": gptq(8, 32, True),
    "awq": awq(32),
    "compressed-4": compressed(4, 32, False),
    "compressed-4-zeros": compressed(4, 64, True),
    "compressed-8": compressed(8, None, False),
    "auto-round-gptq": auto_round(gptq(4, 32, True)),
    "auto-round-awq": auto_round(awq(32)),
    "bitsandbytes-8": bitsandbytes(),
}


def publish(folder, method, change=None, settings=None):
    """Write a model whose layers are codes; return one with the weights that these mean."""
    model = tiny_model("qwen3", **K_HEADS)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    most = 2**method.bits
    for name, module in model.named_modules():
        if not name.endswith("_proj"):
            continue
        rows, depth = module.weight.shape
        groups = depth // method.group if method.group else 1
        codes = torch.randint(0, most, (rows, depth), generator=generator)
        zero = torch.full((rows, groups), most // 2)
        if method.zeros:
            zero = torch.randint(0, most, (rows, groups), generator=generator)
        scale = (
            torch.rand(rows, groups, generator=generator) * module.weight.detach().std() * 4 / most
        )
        scale = scale.half().float()
        wide = (codes.unflatten(1, (groups, -1)) - zero[..., None]) * scale[..., None]
        with torch.no_grad():
            module.weight.copy_(wide.flatten(1))
        del tensors[f"{name}.weight"]  # or its codes have that name
        packed = method.pack(codes, scale, zero)
        if change is not None:
            change(packed)
        tensors |= {f"{name}.{part}": x for part, x in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = method.settings | (settings or {})
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("name", METHODS)
def test_a_text_is_that_of_the_weights_that_codes_mean(tmp_path, name):
    expected = publish(tmp_path, METHODS[name])
    model, (text,) = load_causal_model(tmp_path, torch.float32), prompts([20])
    found = model.model.layers[1].mlp.down_proj
    assert type(found) is QuantisedLinear
    assert (found.zero is None) != METHODS[name].zeros
    assert torch.equal(
        found.weight.dequantised(torch.float32), expected.model.layers[1].mlp.down_proj.weight
    )
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)
    assert not hasattr(model.config, "quantization_config")
    assert is_recorded(Target(model, 1, 40))
    plain = greedy_by_transformers(expected, text, 16)
    for method in ("plain", "token_recycling", "vegas:gamma=3,ratio=0.5,min_tokens=2"):
        output = generate(model, text, method, max_new_tokens=16, temperature=0)
        assert output.new_tokens == [plain]


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("gptq-4", {"bits": 3}, "gptq with bits=3 is not read here, but with 4 or 8"),
        ("gptq-4", {"desc_act": True}, "gptq with desc_act=True is not read here, but with False"),
        ("awq", {"version": "gemv"}, "awq with version='gemv' is not read here, but with 'gemm'"),
        ("compressed-4", {"format": "marlin-24"}, "compressed-tensors with format='marlin-24' is"),
        ("compressed-4", {"config_groups": {}}, "compressed-tensors with 0 groups of layers is"),
        ("auto-round-awq", {"bits": 2}, "awq with bits=2 is not read here, but with 4"),
        ("auto-round-gptq", {"data_type": "mx_fp"}, "auto-round with data_type='mx_fp' is not"),
        ("auto-round-gptq", {"act_bits": 8}, "auto-round with act_bits=8 is not read here, but wi"),
        (
            "auto-round-gptq",
            {"packing_format": "auto_round:fp8"},
            "auto-round with packing_format='auto_round:fp8' is not read here, but with "
            "'auto_round:auto_gptq' or 'auto_round:auto_awq'",
        ),
    ],
)
def test_what_is_not_read_is_named(tmp_path, name, settings, reason):
    publish(tmp_path, METHODS[name], settings=settings)
    with pytest.raises(ValueError, match=rf"the weights in {tmp_path} cannot be read: {reason}"):
        load_causal_model(tmp_path, "auto")


def without(name):
    return lambda packed: packed.pop(name)


def broken(name, place):
    def change(packed):
        packed[name][place] = torch.nan

    return change


def scales(change):
    return lambda packed: packed.update(weight_scale=change(packed["weight_scale"]).clone())


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gptq-4", without("scales"), "it lacks 'scales'"),
        ("gptq-4", broken("scales", (0, 3)), r"\d+ of \d+ scales are not finite"),
        ("awq", lambda x: x.update(qweight=x["qweight"][:32].clone()), "expected codes"),
        ("awq", lambda x: x.update(qzeros=x["qzeros"][:1].clone()), "expected zero points"),
        ("bitsandbytes-8", lambda x: x["weight_format"].fill_(1), "its codes do not lie in rows"),
        ("bitsandbytes-8", without("weight"), "it lacks 'weight'"),
        ("bitsandbytes-8", broken("SCB", 3), r"\d+ of \d+ scales are not finite"),
        ("gptq-4", lambda x: x.update(g_idx=x["g_idx"].flip(0)), r"its groups .* \(act-order\)"),
        (
            "compressed-4",
            lambda x: x.update(weight_packed=x["weight_packed"][:, 1:].clone()),
            r"expected codes \[\d+, 128\] and scales \[\d+, groups\], got \[\d+, 120\] and scales",
        ),
        (
            "compressed-4",
            scales(lambda x: x[:1]),
            r"expected .* scales \[\d+, gr.* scales \[1, \d\]$",
        ),
        (
            "compressed-4",
            scales(lambda x: x[:, 0]),
            r"expected .* scales \[\d+, gr.* scales \[\d+\]$",
        ),
        ("compressed-4", scales(lambda x: x[:, :0]), r"expected .* scales \[\d+, gr.* \[\d+, 0\]$"),
        (
            "compressed-4",
            scales(lambda x: x[:, :1].repeat(1, 3)),
            "3 scales of a row do not divide its 128 codes",
        ),
        (
            "compressed-4",
            scales(torch.zeros_like),
            r"\d+ of \d+ scales are 0, of weights that are not",
        ),
    ],
)
def test_layers_that_do_not_fit_are_named(tmp_path, name, change, reason):
    publish(tmp_path, METHODS[name], change)
    message = rf"the weights in {tmp_path} cannot be read: model.layers.0.\w+.\w+: {reason}"
    with pytest.raises(ValueError, match=message):
        load_causal_model(tmp_path, "auto")


def test_groups_that_no_kernel_takes(tmp_path):
    publish(tmp_path, compressed(4, 16, False))
    with pytest.raises(ValueError, match="groups of 16 are not served"):
        load_causal_model(tmp_path, "auto")
