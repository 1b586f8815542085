"""Weights of 8 and 4 bits: every method's text is that of plain decoding over the same weights."""

import copy
import gc
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from specattn import _cpu
from specattn.decoding import METHODS, Target, generate
from specattn.decoding.model.quantised import (
    QUANTIZE,
    QuantisedLinear,
    layers_to_round,
    quantised,
    round_as,
)
from specattn.decoding.model.weights import Reordered
from specattn.quantised import QuantisedWeight, quantise, quantise_float8
from tests.decoding.fuzzing import UNTRAINED
from tests.decoding.models import greedy_by_transformers, is_recorded, prompts, tiny_model
from tests.decoding.settings import NAMES, settings_of

WHOLE_GROUPS = {"hidden_size": 64, "intermediate_size": 128}
FAMILIES = ["qwen3", "gemma2", "phi3", "glm4", "gpt_oss", "qwen3_moe", "qwen3_5", "olmo_hybrid"]


def model_of(family="qwen3", **options):
    return tiny_model(family, **WHOLE_GROUPS, **options)


@pytest.fixture(scope="module")
def model():
    return model_of(vocab_size=24, peak=1.0)


@pytest.fixture(scope="module")
def plain(model):
    """Return plain decoding's texts by how weights are rounded."""
    return {kind: texts(model, "plain", kind) for kind in QUANTIZE}


def texts(model, method, kind, **options):
    given = prompts([30, 9], vocabulary=24, seed=3)
    options = {"max_new_tokens": 24, "temperature": 0, **options}
    return generate(model, given, method, quantize=kind, **options).new_tokens


def rounded(model, kind):
    """Return a copy of a model whose layers' weights are what the codes of them mean."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                few = round_as(module.weight, kind)
                module.weight.copy_(few.dequantised(torch.float32))
    return model


@pytest.mark.filterwarnings("ignore:.*decodes through its own, slower modules")
@pytest.mark.parametrize("kind", QUANTIZE)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_is_that_of_rounded_weights(family, kind):
    own = {"head_dim": 16} if family == "olmo_hybrid" else {}  # whole groups before its output
    model = model_of(family, **own)
    (text,) = prompts([20])
    whole = rounded(model, kind)
    with torch.no_grad():
        given, logits = quantised(model, kind)(text[None]).logits, whole(text[None]).logits
        others = model(text[None]).logits
    close = {"rtol": 1e-4, "atol": 5e-3}  # logits are up to 60
    assert torch.allclose(given, logits, **close)
    assert not torch.allclose(given, others, **close)
    expected = greedy_by_transformers(whole, text, 16)
    found = generate(model, text, "plain", quantize=kind, max_new_tokens=16, temperature=0)
    assert found.new_tokens[0] == expected
    few = Target(model, 1, 40, quantize=kind)
    assert any(isinstance(module, QuantisedLinear) for module in few.model.modules())
    assert is_recorded(few) or family == "glm4"  # as with whole weights


@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_those_of_plain_decoding(model, plain, name):
    for kind in QUANTIZE:
        method = settings_of(model)[name]
        if name == "cast" and kind == "int4":  # there is nothing to round
            continue
        assert texts(model, method, kind) == plain[kind]


@pytest.mark.parametrize("kind", QUANTIZE)
def test_recorded_passes_are_the_modules(model, plain, kind):
    assert texts(model, "plain", kind, compile="off") == plain[kind]
    assert texts(model, "token_recycling:nodes=9", kind, compile="off") == plain[kind]


def test_a_seed_decides_the_text(model):
    sampling = {"temperature": 1.3, "top_k": 0, "seed": 5}
    expected = texts(model, "plain", "int4", **sampling)
    assert expected != texts(model, "plain", "int4")
    for name in ("vegas", "longspec-tree", "suffix", "poss"):
        assert texts(model, settings_of(model)[name], "int4", **sampling) == expected


@settings(max_examples=20)
@given(st.data())
def test_fuzz(data):
    family = data.draw(st.sampled_from(["qwen3", "llama", "gemma2", "gpt_oss"]), "family")
    kind = data.draw(st.sampled_from([name for name in UNTRAINED if name != "cast"]), "kind")
    method = METHODS[kind](**data.draw(UNTRAINED[kind], "options"))
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3), "lengths")
    given = prompts(lengths, vocabulary=12, seed=data.draw(st.integers(0, 99), "seed"))
    options = {"max_new_tokens": data.draw(st.integers(1, 12)), "temperature": 0}
    options["quantize"] = data.draw(st.sampled_from([*QUANTIZE]), "quantize")
    model = model_of(family, vocab_size=12)
    found, expected = (generate(model, given, x, **options).new_tokens for x in (method, "plain"))
    assert found == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits(dtype):
    model = model_of().to(dtype)
    for kind in QUANTIZE:
        few = quantised(model, kind)
        module = few.model.layers[1].mlp.down_proj
        expected = round_as(model.model.layers[1].mlp.down_proj.weight, kind)
        codes = module.weight.in_rows().codes
        assert torch.equal(codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert module.scale.dtype == torch.bfloat16
        target = Target(model, 1, 40, quantize=kind)
        assert is_recorded(target)
        assert target.model is few


@pytest.mark.parametrize("kind", QUANTIZE)
def test_codes_stay_codes_where_a_model_gets_another_type(kind):
    few, (text,) = copy.deepcopy(quantised(model_of(), kind)), prompts([5])
    codes = [x.codes.view(torch.uint8).clone() for x in few.modules() if hasattr(x, "codes")]
    few.to(torch.bfloat16)
    assert few(text[None]).logits.dtype == torch.bfloat16
    found = [x.codes.view(torch.uint8) for x in few.modules() if hasattr(x, "codes")]
    assert all(map(torch.equal, found, codes))


def test_the_model_itself_stays_and_both_go_together():
    model = model_of()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    few = quantised(model, "int8")
    assert few is quantised(model, "int8")
    assert few is not quantised(model, "int4")
    assert few.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert few.lm_head.weight is model.lm_head.weight
    assert few.model.norm.weight is model.model.norm.weight
    assert type(few.model.layers[0].self_attn.q_proj) is QuantisedLinear
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    model, few = weakref.ref(model), weakref.ref(few)
    gc.collect()
    assert model() is None
    assert few() is None


def short_of_memory(monkeypatch, free=1000):
    monkeypatch.setattr("specattn.decoding.model.quantised.available_bytes", lambda device: free)


def watched(monkeypatch, model):
    """Return a list that fills with how many bytes of weights are left when a layer is rounded."""
    weights = [weakref.ref(layer.weight) for layer in layers_to_round(model).values()]
    left = []

    def noted(weight, kind):
        gc.collect()
        left.append(sum(one.nbytes for ref in weights if (one := ref()) is not None))
        return round_as(weight, kind)

    monkeypatch.setattr("specattn.decoding.model.quantised.round_as", noted)
    return left, [ref().nbytes for ref in weights]


@pytest.mark.parametrize("kind", QUANTIZE)
def test_where_memory_is_short_each_layer_is_freed_before_the_next(kind, monkeypatch):
    model, text = model_of("llama", num_hidden_layers=1), prompts([9])
    expected = generate(quantised(copy.deepcopy(model), kind), text, "plain", max_new_tokens=5)
    generate(model, text, "plain", max_new_tokens=5)  # what it leaves may hold weights, too
    left, sizes = watched(monkeypatch, model)
    short_of_memory(monkeypatch)
    said = (
        rf"quantize='{kind}': rounded weights take up to 0.\d MiB beside the model's, and cpu has "
    )
    with pytest.warns(UserWarning, match=said + r"0\.0 MiB: the model's own layers were rounded"):
        found = generate(model, text, "plain", max_new_tokens=5, quantize=kind)
    assert left == [sum(sizes[i:]) for i in range(len(sizes))]
    assert torch.equal(found.sequences[0], expected.sequences[0])
    assert type(model.model.layers[0].self_attn.q_proj) is QuantisedLinear
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantised(model, kind) is model
    with pytest.raises(ValueError, match="bits already"):
        quantised(model, "int8" if kind == "fp8" else "fp8")


def test_a_model_that_is_given_up_is_rounded_in_place_and_nothing_said(monkeypatch):
    model = model_of("llama", num_hidden_layers=1)
    left, sizes = watched(monkeypatch, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantised(model, "int4", in_place=True) is model
    assert left == [sum(sizes[i:]) for i in range(len(sizes))]


def test_what_cannot_be_rounded_stays_whole_in_place():
    model = model_of("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match="quantize='int8': model.layers.1.mlp.up_proj: weight: ex"):
        quantised(model, "int8", in_place=True)
    assert all(type(layer) is nn.Linear for layer in layers_to_round(model).values())


def test_drafts_need_memory_for_both(monkeypatch):
    """Whose tokens are verified by the model's own weights."""
    model = model_of("llama")
    short_of_memory(monkeypatch)
    said = (
        r"weights='int4': rounded weights take up to 0\.\d MiB beside the model's, and cpu has 0\.0"
    )
    with pytest.raises(ValueError, match=said):
        generate(model, prompts([9]), "cast", max_new_tokens=5)
    assert all(type(layer) is nn.Linear for layer in layers_to_round(model).values())


def test_many_rows_are_those_of_few():
    few = quantised(model_of(), "int4").model.layers[0].mlp.gate_proj
    x = torch.randn(2, 50, 64)
    with torch.no_grad():
        whole, parts = few(x), torch.cat([few(x[:, :25]), few(x[:, 25:])], 1)
    assert torch.allclose(whole, parts, rtol=1e-5, atol=1e-5)


def test_what_groups_have_lies_as_a_device_reads_it():
    few = quantise(torch.randn(24, 192), bits=4)
    layer = QuantisedLinear(few, None)
    assert layer.weight.scale.stride() == (3, 1)
    layer = copy.deepcopy(layer).to("meta")  # as to any device but a CPU
    assert layer.weight.scale.shape == (24, 3)
    assert layer.weight.scale.stride() == (1, 24)
    by_columns = few.scale.t().contiguous().t()
    moved = QuantisedWeight(few.codes, by_columns, None, few.depth).laid()
    assert moved.scale.stride() == (3, 1)
    assert torch.equal(moved.scale, few.scale)


@pytest.fixture
def by_tiles(monkeypatch):
    """Let this processor be one that multiplies faster with codes in tiles."""
    monkeypatch.setattr("specattn.quantised._BY_TILES", (_cpu.isa(),))


def same(a, b):
    tensors = zip((a.codes, a.scale, a.zero), (b.codes, b.scale, b.zero), strict=True)
    return all(x is y is None or torch.equal(x, y) for x, y in tensors)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_tiles_are_laid_where_they_are_faster(by_tiles, bits, zeros):
    few = quantise(torch.randn(48, 192), bits)
    if zeros:
        few = replace(few, zero=torch.randint(0, 15, (48, 3)).to(few.codes.dtype))
    layer = QuantisedLinear(few, None)
    tiles = layer.weight
    assert (tiles.tiled, tiles.bits, len(tiles)) == (True, bits, 48)
    assert tiles.laid() is tiles
    assert same(tiles.in_rows(), few)
    assert torch.equal(tiles.dequantised(torch.float32), few.dequantised(torch.float32))
    for sizes in ([16, 32], [24, 24]):  # whole tiles, and none
        parts = tiles.split(sizes)
        assert [part.tiled for part in parts] == [sizes[0] == 16] * 2
        assert all(map(same, [part.in_rows() for part in parts], few.split(sizes)))
    x = torch.randn(3, 192)
    with torch.no_grad():
        exact = x.double() @ few.dequantised(torch.float64).T
        assert torch.allclose(layer(x).double(), exact, rtol=1e-5, atol=1e-5)
    moved = copy.deepcopy(layer).to("meta").weight  # as to any device but a CPU
    assert (moved.codes.dtype, moved.codes.shape) == (few.codes.dtype, few.codes.shape)
    assert moved.scale.stride() == (1, 48)


def test_what_a_layer_interleaves_is_taken_from_tiles(by_tiles):
    few, order = quantise(torch.randn(64, 64), bits=4), Reordered()
    layer = QuantisedLinear(few, None)
    wide = few.dequantised(torch.float32).unflatten(0, (2, 2, 16))
    for factor in (1, 2):
        parts = [part.weight for part in order.parts(layer, 2, (16, 16), "here")]
        assert [part.tiled for part in parts] == [True, True]
        for n, part in enumerate(parts):
            assert torch.equal(part.dequantised(torch.float32), factor * wide[:, n].flatten(0, 1))
        assert order.parts(layer, 2, (16, 16), "here")[0].weight is parts[0]
        layer.scale.mul_(2)  # is copied again


def test_what_makes_no_tiles_lies_in_rows(by_tiles):
    for few in (quantise(torch.randn(24, 64), 8), quantise(torch.randn(32, 68), 8, None)):
        assert not few.laid().tiled
    assert not quantise_float8(torch.randn(32, 64)).laid().tiled


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("tiles", [False, True])
def test_texts_are_the_methods_own_however_codes_lie(monkeypatch, kind, tiles):
    monkeypatch.setattr("specattn.quantised._BY_TILES", (_cpu.isa(),) if tiles else ())
    model = model_of("olmo_hybrid", vocab_size=24, peak=1.0)
    found, expected = (texts(model, method, kind) for method in ("suffix", "plain"))
    assert found == expected
    layer = quantised(model, kind).model.layers[0].mlp.gate_proj
    assert layer.weight.tiled == tiles


def test_what_is_refused(model):
    with pytest.raises(ValueError, match="quantize: expected None or one of .*, got 'fp4'"):
        texts(model, "plain", "fp4")
    for kind, bits in (("int4", 4), ("int8", 8)):
        message = rf"quantize='int8': model.layers.0.\w+.\w+ has weights of {bits} bits already"
        with pytest.raises(ValueError, match=message):
            quantised(quantised(model, kind), "int8")
    message = "quantize=.int4.: transformer.h.0.attn.c_proj is a Conv1D"
    with pytest.raises(ValueError, match=message):
        quantised(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), "int4")
    wrong = model_of()
    wrong.model.layers[1].mlp.up_proj.weight.data[3, 3] = torch.nan
    with pytest.raises(ValueError, match="quantize='int8': model.layers.1.mlp.up_proj: weight: ex"):
        quantised(wrong, "int8")
