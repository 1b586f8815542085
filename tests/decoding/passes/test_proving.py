"""A model is taken because it agrees with itself, and refused where it does not."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconMambaConfig,
    GemmaConfig,
    KimiLinearConfig,
    Llama4TextConfig,
    MiniMaxConfig,
    OlmoeConfig,
    Qwen3NextConfig,
    Starcoder2Config,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from specattn.decoding import FAMILIES, Target, generate, prove
from specattn.decoding.model.families import Family, check_supported
from specattn.decoding.passes import attention, interface, probe, proving
from tests.decoding.models import (
    SHAPE,
    WINDOW,
    decisive,
    greedy_by_transformers,
    prompts,
    tiny_model,
)
from tests.decoding.test_greedy import METHODS


def strange_model(config_class=Starcoder2Config, **options):
    """Return a tiny model of a family that has no record."""
    torch.manual_seed(0)
    config = config_class(**{**SHAPE, **options})
    assert config.model_type not in FAMILIES
    return decisive(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


UNKNOWN = {
    "starcoder2": (Starcoder2Config, {"sliding_window": WINDOW}),
    "gemma": (GemmaConfig, {}),
    "olmoe": (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}


@pytest.mark.filterwarnings("ignore:.* decodes through its own:UserWarning")
@pytest.mark.parametrize("method", ["plain", "token_recycling"])
@pytest.mark.parametrize("family", UNKNOWN)
def test_a_family_without_a_record_is_taken(family, method):
    config_class, options = UNKNOWN[family]
    model, texts = strange_model(config_class, **options), prompts([5, 30])
    output = generate(model, texts, METHODS[method], max_new_tokens=12)
    assert output.new_tokens == [greedy_by_transformers(model, p, 12) for p in texts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_what_agrees_is_taken_in_every_dtype(family, dtype):
    prove(tiny_model(family, peak=1.0).to(dtype))


def refused(model, where):
    """Expect that a model is refused, with a figure and a place."""
    pattern = rf"type '{model.config.model_type}'.* differ by \d\.\de.\d\d .* first in {where}"
    return pytest.raises(ValueError, match=pattern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_longer_than_the_probe_is_seen_to_be_missing(dtype, monkeypatch):
    """Layers 1 and 2 slide, and never so far in the probe's own texts as the model's window."""
    monkeypatch.setitem(FAMILIES, "qwen2", Family(sliding_layers="none"))
    model = tiny_model("qwen2-sliding", sliding_window=400, peak=1.0).to(dtype)
    model.model.layers[1].self_attn.sliding_window = None  # nor does it ask for one
    model.model.layers[2].self_attn.sliding_window = None
    with refused(model, "the attention of layer 1"):
        prove(model)


@pytest.mark.parametrize("option", ["softcap", "s_aux", "scaling"])
def test_an_option_that_is_not_obeyed_is_noticed(option, monkeypatch):
    inner = interface.attention

    def without(*arguments, **options):
        options[option] = 0.5 if option == "scaling" else None
        return inner(*arguments, **options)

    monkeypatch.setattr(interface, "attention", without)
    model = tiny_model("gpt_oss" if option == "s_aux" else "gemma2")
    with refused(model, "the attention of layer 0"):
        prove(model)


def test_a_tree_that_is_taken_for_a_chain_is_noticed(monkeypatch):
    chain = attention.Pass.attend

    def attend(self, *heads, **options):
        self.tree_mask = None
        return chain(self, *heads, **options)

    monkeypatch.setattr(attention.Pass, "attend", attend)
    model = tiny_model("llama")
    with refused(model, "the attention of layer 0"):
        prove(model)


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logits_scaling", "logit_scale"])
def test_a_transform_of_logits_that_a_model_does_not_do_is_noticed(name):
    model = tiny_model("llama")
    setattr(model.config, name, 2.0)
    with refused(model, "what follows the attention of the last layer"):
        prove(model)


def test_what_a_layer_does_to_its_input_is_none_of_our_business():
    model = tiny_model("llama")
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda hidden, *a, **k: forward(hidden, *a, **k) * 1.5
    (text,) = prompts([20])
    output = generate(model, text, "plain", max_new_tokens=8, compile="off")
    assert output.new_tokens == [greedy_by_transformers(model, text, 8)]


REFUSED = {
    "encoder-decoder": (T5Config(), "'t5'.* an encoder-decoder"),
    "MLA": (
        DeepseekV3Config(kv_lora_rank=520),
        "'deepseek_v3'.* kv_lora_rank must be a multiple of 8 up to 512, got 520",
    ),
    "indexed-MLA": (DeepseekV32Config(), "'deepseek_v32'.* layers of type indexed_attention"),
    "hybrid": (MiniMaxConfig(), "'minimax'.* layers of type linear_attention"),
    "hybrid-MLA": (KimiLinearConfig(), "'kimi_linear'.* layers of type linear_attention"),
    "states-alone": (
        Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention"] * 2),
        "'qwen3_next'.* no layer of it has keys and values",
    ),
    "large-states": (
        Qwen3NextConfig(linear_value_head_dim=264),
        "'qwen3_next'.* linear_value_head_dim must be a multiple of 8 up to 256, got 264",
    ),
    "state": (FalconMambaConfig(), "'falcon_mamba'"),
    "chunked": (Llama4TextConfig(), "'llama4_text'.* layers of type chunked_attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_configuration_rules_out_is_refused_with_the_reason(name):
    config, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        check_supported(config)


def test_layers_that_attend_by_themselves_are_refused():
    config = BloomConfig(vocab_size=96, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match="'bloom'.* do not attend through transformers'"):
        Target(AutoModelForCausalLM.from_config(config), batch=1, capacity=8)


@pytest.fixture
def probed(monkeypatch):
    """Return the models that have been probed."""
    seen, inner = [], proving._probe
    monkeypatch.setattr(proving, "_probe", lambda model: (seen.append(model), inner(model)))
    return seen


def test_a_model_is_probed_once(probed, monkeypatch):
    monkeypatch.delenv("SPECATTN_CACHE", raising=False)
    model = tiny_model("llama")
    for _ in range(2):
        Target(model, 1, 8)
    assert probed == [model]
    prove(tiny_model("llama"))
    assert len(probed) == 2


def test_what_was_found_is_kept_on_disk(probed, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        prove(tiny_model("llama"))
    assert len(probed) == 1
    others = [
        tiny_model("llama").bfloat16(),
        tiny_model("llama", rms_norm_eps=1e-3),
        tiny_model("qwen3"),
    ]
    for model in others:
        prove(model)
    assert probed[1:] == others


def test_a_refusal_is_not_kept(probed, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    model = tiny_model("llama")
    model.config.logit_scale = 2.0
    for _ in range(2):
        with refused(model, "what follows"):
            prove(model)
    assert len(probed) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_tested_family_can_be_trusted_and_no_other(probed):
    prove(tiny_model("llama"), trust_family=True)
    assert probed == []
    model = strange_model()
    prove(model, trust_family=True)
    assert probed == [model]


def test_the_probe_leaves_the_model_as_it_was():
    model = tiny_model("gpt_oss")
    config, weights = model.config.to_dict(), copy.deepcopy(model.state_dict())
    base = model.model
    prove(model)
    found = model.config.to_dict()
    assert found == config
    assert model.model is base
    assert base.config is model.config
    assert all(weights[name].equal(x) for name, x in model.state_dict().items())


def forbidding(value):
    """Return a model whose head has a bias of `value` for some tokens, and none for others."""
    model = tiny_model("llama")
    head = torch.nn.Linear(32, 96)
    head.weight, head.bias.data[:] = model.lm_head.weight, 0.0
    head.bias.data[[3, 50, 51]] = value
    model.lm_head = head
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_minus_infinity_agree_with_themselves(dtype):
    prove(forbidding(-torch.inf).to(dtype))


@pytest.mark.parametrize("method", ["plain", "token_recycling", "vegas"])
def test_a_text_of_a_head_that_forbids_tokens(method):
    model, texts = forbidding(-torch.inf), prompts([5, 20])
    output = generate(model, texts, METHODS[method], max_new_tokens=12)
    assert output.new_tokens == [greedy_by_transformers(model, p, 12) for p in texts]


def test_minus_infinity_agrees_with_nothing_else(monkeypatch):
    """Another token is forbidden to passes of ours than to the model itself."""
    model, inner = forbidding(-torch.inf), probe._verified

    def swapped(*given):
        verified = inner(*given)
        model.lm_head.bias.data = model.lm_head.bias.data.roll(1)
        return verified

    monkeypatch.setattr(probe, "_verified", swapped)
    with pytest.raises(ValueError, match="differ by inf in their logits"):
        prove(model)


def test_logits_that_are_no_numbers_are_called_so():
    with pytest.raises(ValueError, match="the model's lm_head.bias has NaN among its values"):
        prove(forbidding(torch.nan))
    model = tiny_model("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[:] = torch.nan
    with pytest.raises(ValueError, match="model.layers.1.self_attn.v_proj.weight has NaN"):
        prove(model)
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj.weight.data[:] = torch.inf
    with pytest.raises(ValueError, match="have NaN among .*, first in the attention of layer 2"):
        prove(model)


@pytest.mark.parametrize("first", [True, False])
def test_autocast_is_refused_by_its_name(first):
    model, (text,) = tiny_model("llama"), prompts([9])
    if first:
        generate(model, text, "plain", max_new_tokens=2)
    message = r"torch.autocast\('cpu', torch.bfloat16\) is on"
    with torch.autocast("cpu", torch.bfloat16):
        for attempt in (prove, lambda model: generate(model, text, "plain", max_new_tokens=2)):
            with pytest.raises(ValueError, match=message):
                attempt(model)
    output = generate(model, text, "plain", max_new_tokens=2)
    assert output.new_tokens == [greedy_by_transformers(model, text, 2)]


@pytest.mark.filterwarnings("ignore:.* decodes through its own:UserWarning")
@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "qwen3_5", "deepseek_v3"])
def test_a_model_exits_where_its_configuration_says(family, first, compile):
    layers = 8 if family == "qwen3_5" else 4  # of whose layers every fourth has keys
    model, (text,) = tiny_model(family, num_hidden_layers=layers), prompts([20])
    if first:
        generate(model, text, "suffix", max_new_tokens=8)
    model.config.num_hidden_layers = layers // 2
    expected = [greedy_by_transformers(model, text, 8)]
    assert generate(model, text, "suffix", max_new_tokens=8, compile=compile).new_tokens == expected


@pytest.mark.parametrize("first", [True, False])
def test_fewer_layers_than_the_configuration_says_are_refused_with_both_numbers(first):
    model, (text,) = tiny_model("llama", num_hidden_layers=4), prompts([9])
    if first:
        generate(model, text, "plain", max_new_tokens=2)
    model.model.layers = model.model.layers[:3]
    with pytest.raises(ValueError, match="num_hidden_layers is 4 .* the model has 3 layers"):
        generate(model, text, "plain", max_new_tokens=2)
    model.config.num_hidden_layers = 3
    output = generate(model, text, "plain", max_new_tokens=2)
    assert output.new_tokens == [greedy_by_transformers(model, text, 2)]


def test_layers_that_call_themselves_otherwise_are_refused():
    model = tiny_model("llama", num_hidden_layers=4)
    del model.model.layers[1]
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="num_hidden_layers is 3 .* layer_idx of another .* is 3"):
        prove(model)


def test_what_is_on_disk_is_not_believed_of_changed_code(probed, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    prove(tiny_model("llama"))
    hooked, other, patched = (tiny_model("llama") for _ in range(3))
    hooked.register_forward_hook(lambda *_: None)
    other.model.layers[0].mlp.__class__ = type("Other", (LlamaMLP,), {})
    for model in (hooked, hooked, other):
        prove(model)
    assert probed[1:] == [hooked, other]
    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x))
    prove(patched)
    assert probed[3:] == [patched]
