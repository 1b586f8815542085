"""`generate`: prompts of every form, options and listeners."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from specattn import use_backend
from specattn.decoding import METHODS, Vegas, generate
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


def test_the_cache_that_transformers_takes_by_default_may_be_named(model):
    given = {"max_new_tokens": 4, "cache_implementation": "dynamic"}
    (text,) = prompts([9])
    found = generate(model, text, VEGAS, **given).new_tokens
    assert found == [greedy_by_transformers(model, text, 4)]


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
