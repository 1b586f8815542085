"""Caches of 8 bits: every method's text is that of plain decoding over the same cache."""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specattn.reference._eight_bits import dequantised, dynamic_scale, quantised
from transformers import AttentionInterface, AttentionMaskInterface, LogitsProcessorList

from specattn.blocks.recorder import Recorder
from specattn.decoding import Target, generate
from specattn.decoding.engine import target
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.decoding.passes.interface import eager_attention
from specattn.kv_cache import KVCache
from specattn.tree import Tree
from tests.decoding.fuzzing import methods, model_of
from tests.decoding.models import prompts, tiny_model
from tests.decoding.settings import NAMES, settings_of

KV_DTYPES = ("int8", "fp8", "fp8_e5m2")


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", vocab_size=24, peak=1.0)


@pytest.fixture(scope="module")
def plain(model):
    """Return plain decoding's texts by type of the cache."""
    return {kv: texts(model, "plain", kv) for kv in KV_DTYPES}


def output_of(model, method, kv_dtype, **options):
    given = prompts([30, 9], vocabulary=24, seed=3)
    options = {"max_new_tokens": 24, "temperature": 0, **options}
    return generate(model, given, method, kv_dtype=kv_dtype, **options)


def texts(*given, **options):
    return output_of(*given, **options).new_tokens


def rounded(x, stored):
    """Return keys or values [.., D] as a cache of 8 bits gives them back."""
    scale = dynamic_scale(x, stored)
    return dequantised(quantised(x, scale, stored), scale, x.dtype)


def logits_of_rounded(family, text, stored):
    """Return logits [L, V] of transformers' own attention to rounded keys and values."""

    def attend(module, query, key, value, *rest, **options):
        read = query, rounded(key, stored), rounded(value, stored)
        return eager_attention(module)(module, *read, *rest, **options)

    AttentionInterface.register("rounded", attend)
    AttentionMaskInterface.register("rounded", AttentionMaskInterface()["eager"])
    model = copy.deepcopy(tiny_model(family))
    model.set_attn_implementation("rounded")
    with torch.no_grad():
        return model(torch.tensor(text)[None], use_cache=False).logits[0]


@pytest.mark.parametrize("compile", ["on", "off"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma2"])
def test_a_text_is_that_of_rounded_keys_and_values(family, compile):
    (text,) = prompts([20])
    options = {"max_new_tokens": 12, "temperature": 0, "compile": compile}
    for kv, stored in target.KV_DTYPES.items():
        output = generate(tiny_model(family), text, "plain", kv_dtype=kv, **options)
        logits = logits_of_rounded(family, [*text.tolist(), *output.new_tokens[0]], stored)
        assert logits[len(text) - 1 : -1].argmax(-1).tolist() == output.new_tokens[0]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_those_of_plain_decoding(model, plain, rounding_ties, name):
    for kv in KV_DTYPES[:2]:
        found = texts(model, settings_of(model)[name], kv)
        rounding_ties.check(found, plain[kv], partial(output_of, model, "plain", kv))


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_recorded_passes_are_the_modules(model, plain, rounding_ties, kv):
    for method, compile in (
        ("plain", "off"),
        ("vegas:gamma=3,ratio=0.5,min_tokens=2", "on"),
        ("token_recycling:nodes=9", "off"),
    ):
        found = texts(model, method, kv, compile=compile)
        rounding_ties.check(found, plain[kv], partial(output_of, model, "plain", kv))


def test_rows_of_8_bits_are_stored_by_the_calls_that_rotate_them(model, monkeypatch):
    called, kernel = Counter(), Recorder.kernel

    def counting(self, function, *arguments):
        called[function.__name__] += 1
        kernel(self, function, *arguments)

    monkeypatch.setattr(Recorder, "kernel", counting)
    calls = []
    for kv in (None, *KV_DTYPES):
        target = Target(model, 1, 64, kv_dtype=kv, compile="on")
        target.prefill(prompts([9], vocabulary=24), 16)
        called.clear()
        target.verify(Tree.chain(2), torch.tensor([[1, 2, 3]]))
        calls.append(Counter(called))
    assert calls[0]["rotate_heads"] == model.config.num_hidden_layers
    assert calls == [calls[0]] * 4


def test_a_seed_decides_the_text(model, rounding_ties):
    drawn = {"temperature": 1.3, "seed": 5}
    plainly = partial(output_of, model, "plain", "int8", top_k=0, **drawn)
    expected = plainly().new_tokens
    assert expected != texts(model, "plain", "int8")
    for name in ("vegas", "longspec-tree", "suffix", "poss"):
        found = texts(model, settings_of(model)[name], "int8", top_k=0, **drawn)
        rounding_ties.check(found, expected, plainly, **drawn)


@settings(max_examples=25)
@given(data=st.data())
def test_fuzz(rounding_ties, data):
    family = data.draw(st.sampled_from(["qwen3", "llama", "gemma2", "gpt_oss"]), "family")
    method = data.draw(methods(family, 12, 8.0), "method")
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3), "lengths")
    given = prompts(lengths, vocabulary=12, seed=data.draw(st.integers(0, 99), "seed"))
    options = {"max_new_tokens": data.draw(st.integers(1, 12)), "temperature": 0}
    options["kv_dtype"] = data.draw(st.sampled_from(KV_DTYPES), "kv_dtype")
    model = model_of(family, 12)
    plainly = partial(generate, model, given, "plain", **options)
    found = generate(model, given, method, **options).new_tokens
    rounding_ties.check(found, plainly().new_tokens, plainly)


def test_a_snapshot_restores_scales_with_their_rows(model, rounding_ties):
    given = prompts([30], vocabulary=24, seed=3)
    snapshot = PromptSnapshot(Target(model, 1, 80, kv_dtype="int8"), given)
    how = {"do_sample": False, "seed": 0}
    runs = [
        snapshot.run(method, 20, LogitsProcessorList(), **how)[0]
        for method in (settings_of(model)["suffix"], settings_of(model)["plain"])
    ]
    again = {"max_new_tokens": 20, "temperature": 0, "kv_dtype": "int8"}
    rounding_ties.check(*runs, partial(generate, model, given, "plain", **again))


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_row_moves_with_its_scale(stored):
    cache = KVCache(2, 2, 10, 3, 8, stored=stored)
    k, v = torch.randn(2, 2, 5, 3, 8) * torch.logspace(-2, 2, 5)[:, None, None]
    for layer in range(2):
        cache.write(layer, k, v, cache.slots(5))
    cache.commit(torch.tensor([[2, 4], [1, -1]]), torch.tensor([2, 1]))
    for half, x in enumerate((k, v)):
        got = cache.numbers(cache.storage[1, half])
        for request, path in ((0, [0, 2, 4]), (1, [0, 1])):
            want = x[request, path]
            error = (got[request, : len(path)] - want).abs().amax(-1) / want.abs().amax(-1)
            assert (error < 0.07).all()
    cache.retire([True, False])
    assert torch.equal(cache.numbers(cache.storage[1, 1])[0, :2], got[1, :2])


def test_rows_beyond_the_capacity_are_refused():
    cache = KVCache(1, 2, 4, 1, 8, stored=torch.int8)
    new = torch.zeros(2, 2, 1, 8)
    with pytest.raises(IndexError, match="slots: expected positions below 4, got 4"):
        cache.write(0, new, new, cache.slots(2, offset=3))


def test_what_is_refused(model):
    with pytest.raises(ValueError, match="kv_dtype: expected None or one of .*, got 'int4'"):
        texts(model, "plain", "int4")
    with pytest.raises(ValueError, match="stored: expected None or torch.int8 or .*, got"):
        KVCache(1, 1, 4, 1, 8, stored=torch.float16)


def test_it_takes_a_quarter_of_the_memory_and_a_scale(model):
    sizes = [Target(model, 1, 64, kv_dtype=kv).cache.nbytes for kv in (None, "fp8")]
    head_dim = model.config.head_dim
    assert sizes[1] / sizes[0] == (head_dim + 4) / (4 * head_dim)
