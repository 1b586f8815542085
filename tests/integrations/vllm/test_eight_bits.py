"""vLLM over caches of 8 bits says what transformers says of keys and values rounded like theirs."""

import pytest

pytest.importorskip("vllm", reason="run by `make test-vllm`")
import torch
from specattn.reference._eight_bits import dequantised, dynamic_scale, quantised
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from specattn.decoding import generate
from specattn.decoding.passes.interface import eager_attention
from specattn.integrations.vllm.attention import EIGHT_BITS, SpecattnAttention, scales_rows
from tests.integrations.vllm.engine import BLOCK, TINY, Engine, prompt_of

ENGINES = {
    "fp8": None,
    "fp8_e5m2": "specattn.integrations.vllm.Auto",
    "int8_per_token_head": "tests.integrations.vllm.always.AlwaysVegas",
}
ROW_BYTES = 2 * 6 * 2 * (64 + 4)  # of a token: keys and values, layers, heads, a row and its scale


@pytest.fixture(scope="module", params=ENGINES)
def stored(request):
    """Name the cache."""
    return request.param


@pytest.fixture(scope="module")
def engine(stored):
    """Return an engine with that cache, too small for many requests, and a drafter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECATTN_VLLM", "1")
        options = {"kv_cache_dtype": stored, "kv_cache_memory_bytes": 12 * BLOCK * ROW_BYTES}
        made = Engine(ENGINES[stored], **options)
        yield made
        made.close()


@pytest.fixture(scope="module")
def model():
    """Return the embedded target."""
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def logprobs(model, stored, prompt, text, whole=()):
    """Return log-probabilities of what follows, where keys and values are rounded.

    Not those of layers in `whole`.
    """

    def rounded(x):
        scale = dynamic_scale(x, EIGHT_BITS[stored]) if scales_rows(stored) else None
        return dequantised(quantised(x, scale, EIGHT_BITS[stored]), scale, x.dtype)

    def attend(module, query, key, value, *rest, **options):
        if module.layer_idx not in whole:
            key, value = rounded(key), rounded(value)
        return eager_attention(module)(module, query, key, value, *rest, **options)

    AttentionInterface.register("rounded", attend)
    AttentionMaskInterface.register("rounded", AttentionMaskInterface()["eager"])
    model.set_attn_implementation("rounded")
    try:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]]), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation("sdpa")
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def follows(model, stored, prompt, text):
    """Say whether each token is the likeliest one where keys and values are rounded."""
    return logprobs(model, stored, prompt, text).argmax(-1).tolist() == text


def test_every_layer_has_our_attention_and_8_bits(engine, stored):
    for layer in engine.layers():
        assert type(layer.impl) is SpecattnAttention
        scale = 4 if scales_rows(stored) else 0
        assert layer.kv_cache.element_size() == 1
        assert layer.kv_cache.shape[-1] == 2 * (64 + scale)


def test_mixed_batches(engine, stored, model):
    prompts = [prompt_of(n, n) for n in (5, BLOCK - 1, BLOCK + 1, 300, 500, 2)]
    for prompt, text in zip(prompts, engine.texts(prompts), strict=True):
        assert follows(model, stored, prompt, text)
    hits = engine.count("prefix_cache_hits")
    assert engine.texts(prompts[3:4]) == engine.texts(prompts[3:4])
    assert engine.count("prefix_cache_hits") > hits


def test_requests_that_are_preempted(engine, stored, model):
    prompts = [prompt_of(BLOCK - 8, 10 + i) for i in range(8)]
    before = engine.count("num_preemptions")
    for prompt, text in zip(prompts, engine.texts(prompts, 32), strict=True):
        assert follows(model, stored, prompt, text)
    assert engine.count("num_preemptions") > before


def test_drafts_are_made_and_accepted(engine, stored):
    engine.texts([prompt_of(600, 50)], 60)
    drafted, accepted = (engine.count(f"spec_decode_num_{x}_tokens") for x in ("draft", "accepted"))
    assert (drafted > 0) == (accepted > 0) == (ENGINES[stored] is not None)


def test_texts_are_those_of_our_own_decoding(engine, stored, model):
    """Which has a scale for each token and head alone."""
    if scales_rows(stored):
        prompts = [prompt_of(n, n) for n in (40, 300)]
        options = {"kv_dtype": "int8", "max_new_tokens": 24, "temperature": 0}
        ids = [torch.tensor(prompt) for prompt in prompts]
        assert engine.texts(prompts) == generate(model, ids, "plain", **options).new_tokens


def check_numbers(engine, model, stored, whole=()):
    """Log-probabilities are those of rounded keys and values, not those of others."""
    prompt = prompt_of(300, 3)
    text, found = engine.logprobs(prompt)
    chosen = torch.tensor(text)[:, None]

    def farthest(whole):
        exact = logprobs(model, stored, prompt, text, whole).gather(1, chosen)[:, 0]
        return float((exact - torch.tensor(found)).abs().max())

    # Rounding of the products before it may store an element one step apart.
    near = farthest(whole)
    assert near < 1e-2
    assert all(4 * near < farthest(other) for other in ((), tuple(range(6))) if other != whole)


def test_numbers_are_those_of_rounded_keys_and_values(engine, stored, model):
    check_numbers(engine, model, stored)


def test_layers_that_are_left_out_keep_their_type(monkeypatch, model):
    monkeypatch.setenv("SPECATTN_VLLM", "1")
    stored = "fp8_per_token_head"
    engine = Engine(kv_cache_dtype=stored, kv_cache_dtype_skip_layers=["0", "4"])
    found = [layer.kv_cache.dtype for layer in engine.layers()]
    assert [dtype == torch.float32 for dtype in found] == [i in (0, 4) for i in range(6)]
    check_numbers(engine, model, stored, whole=(0, 4))
    engine.close()
