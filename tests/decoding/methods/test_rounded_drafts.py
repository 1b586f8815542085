"""Drafts by the target's own weights in 8 and 4 bits, which change no text."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specattn.decoding import METHODS, Target, generate
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.decoding.model.quantised import QUANTIZE, quantised
from specattn.quantised import quantise
from tests.decoding.fuzzing import UNTRAINED
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

# What the cache holds beyond a request's length is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

V = 24
SHARE = {"gamma": 3, "ratio": 0.7, "min_tokens": 4}
SELF_DRAFTING = {
    "vegas": SHARE | {"switch": False},
    "streaming": SHARE | {"sinks": 2},
    "quest": SHARE | {"page_size": 4},
    "specextend": SHARE | {"chunk_size": 4},
    "triforce": SHARE | {"chunk_size": 4},
    "cast": {"gamma": 3},
}
EVERYTHING = {"gamma": 3, "ratio": 1.0}


def model_of(family="qwen3", **options):
    return tiny_model(family, hidden_size=64, intermediate_size=128, vocab_size=V, **options)


def method_of(name, weights="int4", **options):
    return METHODS[name](weights=weights, **(options or SELF_DRAFTING[name]))


@pytest.fixture(scope="module")
def model():
    return model_of(peak=1.0)


def check(model, name, weights, ties=None, **options):
    """Continue a ragged batch; return how many drafted tokens there were, and accepted ones.

    With `ties`, over a cache of 8 bits, a near-tie may part texts.
    """
    texts = prompts([5, 23, 40], vocabulary=V)
    output = generate(model, texts, method_of(name, weights), max_new_tokens=20, **options)
    plainly = partial(generate, model, texts, "plain", max_new_tokens=20, **options)
    expected = plainly().new_tokens
    if ties is None:
        assert output.new_tokens == expected
    else:
        ties.check(output.new_tokens, expected, plainly)
    total = output.statistics.total
    return total.drafted, total.accepted


@pytest.mark.parametrize("weights", QUANTIZE)
@pytest.mark.parametrize("name", SELF_DRAFTING)
def test_greedy_texts_are_plain_decodings(model, name, weights):
    drafted, accepted = check(model, name, weights, temperature=0)
    assert 0 < accepted < drafted


@pytest.mark.filterwarnings("ignore:.*decodes through its own, slower modules")
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_moe", "qwen3_5"])
def test_other_families(family):
    """With layers that slide, or keep a state, and with experts, which stay as they are."""
    check(model_of(family), "vegas", "int4", temperature=0)


@pytest.mark.parametrize("name", SELF_DRAFTING)
def test_a_seed_decides_the_text(model, name):
    check(model, name, "int4", temperature=1.3, top_k=0, seed=5)


def test_passes_that_are_modules(model):
    check(model, "vegas", "int4", temperature=0, compile="off")


def test_over_a_cache_of_8_bits(model, rounding_ties):
    check(model, "vegas", "int4", rounding_ties, temperature=0, kv_dtype="int8")


def test_a_target_of_8_bits_drafts_with_4(model):
    drafted, accepted = check(model, "streaming", "int4", temperature=0, quantize="int8")
    assert 0 < accepted < drafted


def test_drafts_are_those_of_the_rounded_weights(model):
    """Behind a text that sees all of itself, they are what the rounded model would say."""
    (text,) = prompts([30], vocabulary=V)
    expected = greedy_by_transformers(_rounded(model), text, 12)
    own = greedy_by_transformers(model, text, 12)
    target = Target(model, 1, 60)
    beside = target.beside(quantised(model, "int4"))
    # Keys and values of the rounded weights all along: otherwise they would be the target's.
    beside.prefill([text[:-1]], 64)
    tokens = [int(text[-1])]
    for step in range(12):
        logits = beside.draft(torch.tensor([[tokens[-1]]]), step).logits
        tokens.append(int(logits[0, -1].argmax()))
    assert tokens[1:] == expected != own


def test_where_rounding_changes_nothing_every_draft_is_right(model):
    model, texts = _rounded(model), prompts([9, 17], vocabulary=V)
    for name in ("cast", "streaming", "vegas"):
        own = {"gamma": 3} if name == "cast" else dict(EVERYTHING)
        own |= {"switch": False} if name == "vegas" else {}
        output = generate(model, texts, method_of(name, **own), max_new_tokens=13, temperature=0)
        assert output.statistics.total.acceptance_rate == 1


def _rounded(model):
    """Return a copy of a model whose weights are what codes of 4 bits mean."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.weight.copy_(quantise(module.weight, 4, 64).dequantised(torch.float32))
    return model


@settings(max_examples=20)
@given(st.data())
def test_fuzz(data):
    model = model_of(data.draw(st.sampled_from(["qwen3", "llama", "gemma2", "gpt_oss"]), "family"))
    name = data.draw(st.sampled_from([*SELF_DRAFTING]), "name")
    options = data.draw(UNTRAINED[name], "options")
    options["weights"] = data.draw(st.sampled_from([*QUANTIZE]), "weights")
    method = METHODS[name](**options)
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3), "lengths")
    texts = prompts(lengths, vocabulary=V, seed=data.draw(st.integers(0, 99), "seed"))
    options = {"max_new_tokens": data.draw(st.integers(1, 12)), "temperature": 0}
    found, expected = (generate(model, texts, x, **options).new_tokens for x in (method, "plain"))
    assert found == expected


def test_a_full_cache_has_room_for_the_comparison_of_passes(model):
    """The first draft by rounded weights may come when the cache is nearly full."""
    (text,) = prompts([20], vocabulary=V)
    snapshot = PromptSnapshot(Target(copy.deepcopy(model), 1, 24), [text])
    method = method_of("streaming", **EVERYTHING | {"gamma": 1})
    found, _ = snapshot.run(method, 2, [], do_sample=False, seed=0)
    assert found == [greedy_by_transformers(model, text, 2)]


def test_what_is_refused(model):
    with pytest.raises(
        ValueError, match="weights must be one of int8, int4, fp8 or None, got 'int3'"
    ):
        METHODS["vegas"](weights="int3")
    message = r"weights='int4': model.layers.0.\w+.\w+ has weights of 4 bits already"
    with pytest.raises(ValueError, match=message):
        generate(model, [1, 2], "vegas:weights=int4", quantize="int4", max_new_tokens=2)
    with pytest.raises(ValueError, match=r"weights='int8': .* has weights of 8 bits already"):
        METHODS["cast"](weights="int8").prepared(quantised(model, "int8"))
