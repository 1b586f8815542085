"""`generate`: prompts of every form, options, listeners, errors."""

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from specattn import use_backend
from specattn.decoding import METHODS, Vegas, generate
from specattn.decoding.text.numbers import _RANGES
from tests.decoding.models import greedy_by_transformers, letters, prompts, tiny_model
from tests.decoding.test_custom_generate import Recorder

VEGAS = Vegas(gamma=3, ratio=0.5, min_tokens=4)
WITHOUT_DRAFTER = [n for n, method in METHODS.items() if not hasattr(method, "drafter")]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


def test_prompts_of_every_form(model):
    texts = prompts([9, 9])
    expected = [greedy_by_transformers(model, p, 5) for p in texts]
    lists = [p.tolist() for p in texts]
    padded = torch.stack([F.pad(texts[0], (2, 0)), F.pad(texts[1], (0, 2))])
    mask = torch.tensor([[0, 0] + [1] * 9, [1] * 9 + [0, 0]])
    ours = letters()
    strings = [ours.decode(p) for p in texts]
    forms = [
        torch.stack(texts),
        texts,
        lists,
        tuple(lists),
        [p.int() for p in texts],
        torch.stack(texts).numpy(),
        {"input_ids": lists},
        {"input_ids": padded, "attention_mask": mask},
        ours(strings),
        strings,
    ]
    for form in forms:
        output = generate(model, form, max_new_tokens=5, tokenizer=ours)
        assert output.new_tokens == expected
        for sequence, text, new in zip(output.sequences, texts, expected, strict=True):
            assert sequence.tolist() == text.tolist() + new
    for form in (texts[0], lists[0], strings[0], {"input_ids": texts[0]}):
        output = generate(model, form, max_new_tokens=5, tokenizer=ours)
        assert output.new_tokens == expected[:1]
    output = generate(model, padded, max_new_tokens=5, attention_mask=mask)
    assert output.new_tokens == expected


@pytest.mark.parametrize("name", WITHOUT_DRAFTER)
def test_methods_by_name(model, name):
    texts = prompts([9, 30])
    output = generate(model, texts, name, max_new_tokens=5)
    assert output.new_tokens == [greedy_by_transformers(model, p, 5) for p in texts]


def test_a_config_and_arguments_together(model, caplog):
    """Arguments win over the config, which stays as it is."""
    config = GenerationConfig(max_new_tokens=3, repetition_penalty=1.7)
    (text,) = prompts([9])
    output = generate(model, text, VEGAS, generation_config=config, max_new_tokens=6)
    expected = greedy_by_transformers(model, text, 6, repetition_penalty=1.7)
    assert output.new_tokens == [expected]
    assert config.max_new_tokens == 3
    assert "deprecated" not in caplog.text


@pytest.mark.parametrize("temperature", [0, 9.0])
def test_temperature(model, temperature):
    (text,) = prompts([9])
    runs = [
        generate(
            model, text, VEGAS, max_new_tokens=12, temperature=temperature, top_k=0, seed=seed
        ).new_tokens
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert (runs[0] == runs[2]) == (temperature == 0)


@pytest.fixture
def stopping_model():
    """Return a model whose checkpoint says at which strings its texts stop."""
    model = tiny_model("qwen3")
    model.generation_config.stop_strings = ["never so"]
    return model


@pytest.mark.parametrize(
    "given", ["one", "many", "by the config", "by the model", "by the model, with a config"]
)
def test_stop_strings(stopping_model, given):
    model = stopping_model
    (text,), tokenizer = prompts([12]), letters()
    plain = greedy_by_transformers(tiny_model("qwen3"), text, 16)
    string = tokenizer.decode(plain[6:8])
    if given.startswith("by the model"):
        model.generation_config.stop_strings = string
    output = generate(
        model,
        text,
        VEGAS,
        max_new_tokens=16,
        tokenizer=tokenizer,
        **{
            "one": {"stop_strings": string},
            "many": {"stop_strings": ["never so", string]},
            "by the config": {"generation_config": GenerationConfig(stop_strings=string)},
            "by the model": {},
            "by the model, with a config": {"generation_config": GenerationConfig()},
        }[given],
    )
    (new,) = output.new_tokens
    assert new == plain[: len(new)]
    assert tokenizer.decode(new).endswith(string)
    assert len(new) <= 8


@pytest.mark.parametrize("config", [None, GenerationConfig()], ids=["alone", "with a config"])
def test_stop_strings_of_the_model_need_the_tokenizer(stopping_model, config):
    """Or they are turned off."""
    (text,) = prompts([12])
    options = {"max_new_tokens": 4, "generation_config": config}
    with pytest.raises(ValueError, match=r"stop_strings \['never so'\] need tokenizer="):
        generate(stopping_model, text, VEGAS, **options)
    output = generate(stopping_model, text, VEGAS, stop_strings=[], **options)
    assert output.new_tokens == [greedy_by_transformers(tiny_model("qwen3"), text, 4)]


def test_several_sequences_per_prompt(model):
    texts = prompts([4, 9])
    output = generate(
        model, texts, VEGAS, max_new_tokens=4, temperature=9.0, num_return_sequences=2, seed=0
    )
    starts = [sequence[:-4].tolist() for sequence in output.sequences]
    assert starts == [texts[row].tolist() for row in (0, 0, 1, 1)]
    assert len(output.new_tokens) == len(output.statistics.requests) == 4


def test_listeners_hear_everything_once(model):
    texts, heard, filled = prompts([30, 11]), [[], []], []
    output = generate(
        model,
        texts,
        VEGAS,
        max_new_tokens=9,
        prefill_chunk_size=8,
        on_tokens=lambda request, tokens: heard[request].extend(tokens),
        on_prefill=lambda done, total: filled.append((done, total)),
    )
    assert heard == output.new_tokens
    assert filled == [(0, 39), (16, 39), (26, 39), (34, 39), (39, 39)]


def test_a_streamer(model):
    streamer, (text,) = Recorder(), prompts([9])
    output = generate(model, text, VEGAS, max_new_tokens=9, streamer=streamer)
    assert sum(streamer.said, []) == output.sequences[0].tolist()
    assert streamer.ended


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


def test_bfloat16_runs():
    output = generate(tiny_model("qwen3").bfloat16(), prompts([9, 30]), VEGAS, max_new_tokens=6)
    assert [len(new) for new in output.new_tokens] == [6, 6]


@pytest.mark.parametrize("name", WITHOUT_DRAFTER)
def test_float64(model, name):
    texts = prompts([9, 30])
    output = generate(copy.deepcopy(model).double(), texts, name, max_new_tokens=6)
    assert output.new_tokens == [greedy_by_transformers(model, p, 6) for p in texts]


@pytest.mark.skipif(torch.cuda.is_available(), reason="its tensors are on the CPU")
def test_on_triton_kernels():
    """Every kind of pass, in a sliding and in a full layer."""
    model, texts = tiny_model("gpt_oss", num_hidden_layers=2), prompts([4, 10])
    with use_backend("triton"):
        output = generate(model, texts, Vegas(gamma=2, ratio=0.5, min_tokens=4), max_new_tokens=4)
    assert output.new_tokens == [greedy_by_transformers(model, p, 4) for p in texts]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method", WITHOUT_DRAFTER)
@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "mistral-sliding", "gpt_oss"])
def test_on_a_gpu(family, method):
    model, texts = tiny_model(family).cuda(), prompts([9, 300, 170])
    output = generate(model, texts, method, max_new_tokens=32, repetition_penalty=1.3)
    expected = [greedy_by_transformers(model, p.cuda(), 32, repetition_penalty=1.3) for p in texts]
    assert output.new_tokens == expected


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
