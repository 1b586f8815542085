"""A text that goes on where an earlier run ended: what counts as generated."""

import pytest
import torch

from specattn.decoding import TokenSwift, generate
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model
from tests.drafters.test_heads import random_heads

SMALL_VOCABULARY = 8


def test_methods_learn_from_what_an_earlier_run_has_generated():
    model = tiny_model("qwen3", vocab_size=SMALL_VOCABULARY)
    (text,) = prompts([20], vocabulary=SMALL_VOCABULARY)
    whole = greedy_by_transformers(model, text, 60)
    begun = torch.cat([text, torch.tensor(whole[:40])])
    heads = random_heads("tokenswift", model, dtype=torch.float32)
    method = TokenSwift(heads, widths=(1, 2, 2), k=5, budget=200)
    beta = []
    for already in (40, 0):
        output = generate(model, begun, method, max_new_tokens=20, num_pregenerated=already)
        assert output.new_tokens == [whole[40:]]
        beta.append(output.statistics.details["n-gram acceptance, beta"])
    assert beta[0] > beta[1]


def test_a_prompt_must_be_left():
    with pytest.raises(ValueError, match="num_pregenerated must leave at least one token"):
        generate(tiny_model("qwen3"), prompts([9]), "plain", max_new_tokens=2, num_pregenerated=9)
