"""One model, used by many at once: generations, transformers' own generate, callbacks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specattn.decoding import Target, Vegas, generate
from specattn.decoding.engine.snapshot import PromptSnapshot
from tests.decoding.models import CONFIGS, greedy_by_transformers, prompts, tiny_model

VEGAS = Vegas(gamma=2, min_tokens=4, switch=False)


@pytest.mark.parametrize("method", ["plain", VEGAS], ids=["plain", "vegas"])
def test_generations_in_threads_do_not_mix(method):
    model, texts = tiny_model("qwen3"), prompts([5, 9, 17, 23])
    expected = [greedy_by_transformers(model, text, 16) for text in texts]

    def run(number):
        text = texts[number % len(texts)]
        return generate(model, [text], method, max_new_tokens=16).new_tokens[0]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(24)))
    assert found == [expected[number % len(texts)] for number in range(24)]


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "gpt_oss"])
def test_transformers_generate_runs_beside_ours(family):
    model, texts = tiny_model(family), prompts([7, 12, 30])
    expected = [greedy_by_transformers(model, text, 16) for text in texts]

    def run(number):
        text = texts[number % len(texts)]
        if number % 2:
            return greedy_by_transformers(model, text, 16)
        return generate(model, [text], VEGAS, max_new_tokens=16).new_tokens[0]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(18)))
    assert found == [expected[number % len(texts)] for number in range(18)]


@pytest.mark.parametrize("family", CONFIGS)
def test_the_model_computes_what_it_did(family):
    """With padding, a cache and without, after a generation and inside its callback."""
    model = tiny_model(family)
    ids = torch.stack([torch.nn.functional.pad(prompts([9])[0], (3, 0)), prompts([12])[0]])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def calls():
        with torch.no_grad():
            plain, padded = model(ids).logits, model(ids, attention_mask=mask).logits
        return plain, padded, model.generate(ids, attention_mask=mask, max_new_tokens=5)

    expected, inside = calls(), []
    output = generate(
        model, ids, VEGAS, max_new_tokens=4, on_tokens=lambda *_: inside.append(calls())
    )
    assert len(output.new_tokens[0]) == 4
    for found in [calls(), *inside]:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_target_serves_one_generation():
    model, (text,) = tiny_model("llama"), prompts([9])
    snapshot = PromptSnapshot(Target(model, 1, 40), [text])
    options = {"do_sample": False, "seed": 0}

    def again(request, tokens):
        snapshot.run(VEGAS, 4, [], **options)

    with pytest.raises(RuntimeError, match="serves another generation"):
        snapshot.run(VEGAS, 4, [], **options, on_tokens=again)
    assert len(snapshot.run(VEGAS, 4, [], **options)[0][0]) == 4


def test_an_implementation_set_in_mid_run_serves_all_other_calls():
    model, (text,) = tiny_model("llama"), prompts([9])
    expected = greedy_by_transformers(model, text, 6)

    def switch(request, tokens):
        model.set_attn_implementation("eager")

    output = generate(model, [text], VEGAS, max_new_tokens=6, on_tokens=switch)
    assert output.new_tokens == [expected]
    assert model.config._attn_implementation.endswith("eager")
    assert greedy_by_transformers(model, text, 6) == expected
