"""`generate`: arguments that are wrong are named, and numbers of every type are taken."""

import re

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from specattn.decoding import Vegas, generate
from specattn.decoding.text.numbers import _RANGES
from tests.decoding.models import prompts, tiny_model
from tests.decoding.test_custom_generate import Recorder

VEGAS = Vegas(gamma=3, ratio=0.5, min_tokens=4)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "eagle"}, "there is no 'eagle': did you mean 'eagle3'\\?"),
        ({"input_ids": []}, "at least one prompt"),
        ({"input_ids": [[1], []]}, "prompt 1 of shape"),
        ({"input_ids": torch.zeros(2, 2, 2)}, "1-D"),
        ({"input_ids": torch.zeros(2, 2)}, "prompt 0 must hold integers, got torch.float32"),
        ({"input_ids": 7}, "prompt 0 of shape"),
        ({"input_ids": [[1], [2, 96]]}, "prompt 1 .* from 0 to 95, got 2 to 96"),
        ({"input_ids": [[1], [-1]]}, "prompt 1 .* from 0 to 95"),
        ({"input_ids": "text"}, r"prompt 0 is text: .*tokenizer\(...\)"),
        ({"input_ids": [[1], "text"]}, "prompt 1 is text"),
        ({"input_ids": [[1], None]}, "prompt 1 must be token ids, got None"),
        ({"input_ids": {"ids": [1]}}, "cannot pass on ids"),
        ({"input_ids": {}}, "input_ids: expected a mapping"),
        ({"input_ids": {"input_ids": [[1]], "pixels": 1}}, "cannot pass on pixels"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "prompt 0 .*got an empty one"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, r"prompt 0 .*\[2\], got \[1\]"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "prompt 0 must not have gaps"),
        ({"input_ids": [[1]], "attention_mask": [[1], [1]]}, "a row per prompt, 1, got 2"),
        ({"capacity": 11}, "9 tokens.*needs room for 17, but capacity is 11"),
        ({"stop_strings": "x"}, "tokenizer"),
        ({"input_ids": [[1], [2]], "streamer": Recorder()}, "one prompt, got 2"),
        ({"no_such_option": 1}, "no_such_option$"),
        ({"max_token": 1}, "max_token; did you mean 'max_new_tokens'"),
        ({"no_such_option": 1, "generation_config": GenerationConfig()}, "no_such_option"),
        ({"num_beams": 3}, "num_beams=3"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"attention_mask": "ab"}, "attention_mask of prompt 0 must be zeros and ones, got 'ab'"),
        ({"assistant_model": tiny_model("llama")}, "assistant_model"),
        ({"assistant_model": 1, "generation_config": GenerationConfig()}, "assistant_model"),
        ({"assistant_tokenizer": 1, "synced_gpus": True}, "assistant_tokenizer, synced_gpus"),
        ({"custom_generate": VEGAS}, "custom_generate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_are_named(model, arguments, message):
    defaults = {"input_ids": prompts([9]), "method": VEGAS, "max_new_tokens": 4}
    with pytest.raises(ValueError, match=message):
        generate(model, **{**defaults, **arguments})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Vegas, r"method: expected a Method or the name of one, .*; Vegas\(\) is one"),
        (lambda: None, "method: expected a Method or the name of one, got None"),
        (lambda: Vegas(gamma="4"), "gamma: expected an integer, got '4'"),
        (lambda: Vegas(gamma=4.5), "gamma: expected an integer, got 4.5"),
        (lambda: Vegas(gamma=True), "gamma: expected an integer, got True"),
    ],
)
def test_what_is_no_method_is_named(model, make, message):
    with pytest.raises(TypeError, match=message):
        generate(model, prompts([9]), make(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"streamer": print}, "streamer: expected a streamer with put and end, got <built-in"),
        ({"logits_processor": print}, "logits_processor: expected a list of functions, got <built"),
        ({"logits_processor": [3]}, r"logits_processor: expected a list of functions, got \[3\]"),
        ({"stopping_criteria": "x"}, "stopping_criteria: expected a list of functions, got 'x'"),
        ({"prefix_allowed_tokens_fn": [1]}, "prefix_allowed_tokens_fn: expected a function"),
        ({"context_parallel": 2}, "context_parallel: expected a ContextParallel, got 2"),
        ({"tokenizer": 3, "input_ids": "x"}, "tokenizer: expected a tokenizer, got 3"),
        ({"tokenizer": 3, "stop_strings": "x"}, "tokenizer: expected a tokenizer, got 3"),
    ],
)
def test_what_is_of_another_kind_is_named(model, arguments, message):
    defaults = {"input_ids": prompts([9]), "method": VEGAS, "max_new_tokens": 4}
    with pytest.raises(TypeError, match=message):
        generate(model, **{**defaults, **arguments})


def test_a_cache_beyond_the_memory_is_no_allocators_error(model):
    message = r"no memory for a cache of 1 x 1[\d,]+ tokens, [\d,.]+ GiB"
    with pytest.raises(MemoryError, match=message):
        generate(model, prompts([9]), "plain", max_new_tokens=10**12)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_new_tokens", "4", "an integer"),
        ("max_new_tokens", 2.5, "an integer"),
        ("temperature", "0", "a number"),
        ("temperature", [1.0], "a number"),
        ("seed", 2.5, "an integer"),
        ("seed", True, "an integer"),
        ("generator", 3, "a torch.Generator"),
        ("generation_config", {"top_k": 3}, "a GenerationConfig"),
        ("on_tokens", 3, "a function"),
        ("on_round", [], "a function"),
        ("on_prefill", "print", "a function"),
        ("capacity", float("nan"), "an integer"),
        ("num_pregenerated", torch.tensor([1]), "an integer"),
        ("stop_strings", 5, "strings"),
        ("stop_strings", ["a", 5], "strings"),
    ],
)
def test_options_of_a_wrong_type_are_named(name, value, expected):
    """Some were taken silently: a seed where nothing is drawn, a capacity that is no number."""
    options = {"max_new_tokens": 2, "tokenizer": object(), name: value}
    with pytest.raises(TypeError, match=f"^{name}: expected {expected}, got "):
        generate(tiny_model("qwen3"), [1, 2, 3], "plain", **options)


NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE = {
    "temperature": [-1, -0.1, NAN, INF],
    "top_k": [-1],
    "top_p": [2, -0.1, NAN, INF],
    "min_p": [2, -0.1, NAN],
    "top_h": [2, 0, NAN],
    "typical_p": [2, 0, NAN],
    "epsilon_cutoff": [2, -0.1, NAN],
    "eta_cutoff": [2, -0.1, NAN],
    "repetition_penalty": [0, -1, NAN, INF],
    "encoder_repetition_penalty": [0, -1, NAN, INF],
    "no_repeat_ngram_size": [-1],
    "encoder_no_repeat_ngram_size": [-1],
    "max_new_tokens": [-1, 0],
    "max_length": [-1, 0, -(10**400)],
    "min_new_tokens": [-1],
    "min_length": [-1],
    "max_time": [-1, NAN, INF],
    "num_return_sequences": [-1, 0],
    "prefill_chunk_size": [-1, 0],
    "capacity": [-1, 0],
    "num_pregenerated": [-1],
    "seed": [2**64, -(2**63) - 1],
}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("name", "value"), [(name, x) for name, given in OUT_OF_RANGE.items() for x in given]
)
def test_numbers_out_of_range_are_named(model, name, value, do_sample):
    """Also where they would decide nothing: a negative temperature was greedy decoding."""
    options = {"max_new_tokens": 2, "do_sample": do_sample, name: value}
    message = f"^{name} must be an? (integer|number) .*, got {re.escape(repr(value))}$"
    with pytest.raises(ValueError, match=message):
        generate(model, [1, 2, 3], "plain", **options)


def test_every_number_has_a_range():
    assert OUT_OF_RANGE.keys() == _RANGES.keys()


@pytest.mark.parametrize("name", ["prefill_chunk_size", "seed", "capacity", "num_pregenerated"])
def test_numbers_are_looked_at_inside_transformers_too(model, name):
    """A negative chunk left out the prompt."""
    ids, value = prompts([9])[0][None], OUT_OF_RANGE[name][0]
    with pytest.raises(ValueError, match=f"^{name} must be"):
        model.generate(ids, custom_generate=VEGAS, max_new_tokens=2, **{name: value})


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"top_p": 0.0, "top_k": 0, "min_p": 1.0, "typical_p": 1.0},
        {"eta_cutoff": 1.0, "epsilon_cutoff": 0.0, "seed": -1},
        {"seed": 2**64 - 1, "max_time": 0.5, "min_new_tokens": 0, "prefill_chunk_size": 1},
    ],
    ids=str,
)
def test_the_ends_of_ranges_are_taken(model, given):
    options = {"max_new_tokens": 2, "do_sample": True} | given
    (new,) = generate(model, [1, 2, 3], "plain", **options).new_tokens
    assert len(new) == 2


@pytest.mark.parametrize(
    "given",
    [
        {"max_new_tokens": 3, "capacity": 90, "num_pregenerated": 1},
        {"max_length": 6},
        {"max_new_tokens": 3, "temperature": 2.0, "seed": 5, "repetition_penalty": 1.5},
        {"max_new_tokens": 3, "temperature": 2.0, "seed": 5, "top_k": 0, "top_p": 0.75},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [np.asarray, np.float32, torch.tensor])
def test_numbers_of_other_types_are_taken(model, given, kind):
    """Seeds of NumPy, and a temperature of 2 in place of 2.0, ended in others' errors."""

    def converted(value):
        if kind is not np.float32:
            return kind(value)[()]
        return np.int64(value) if isinstance(value, int) else np.float32(value)

    other = {name: converted(value) for name, value in given.items()}
    found = [
        generate(model, [1, 2, 3], "suffix", **options).new_tokens for options in (given, other)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_a_whole_number_is_a_number(model, name):
    options = {"max_new_tokens": 3, "do_sample": True, "seed": 5}
    found = [
        generate(model, [1, 2, 3], "plain", **options, **{name: value}).new_tokens
        for value in (2, 2.0)
    ]
    assert found[0] == found[1]


def test_numbers_of_other_types_are_taken_inside_transformers_too(model):
    ids, given = prompts([9])[0][None], {"max_new_tokens": 4, "do_sample": True}
    found = [
        model.generate(ids, custom_generate=VEGAS, seed=kind(5), **given)
        for kind in (int, np.int64, torch.tensor)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
