"""Positions that a model has not, or where its rope turns: no draft reaches them.

A tree is as deep as the request with the most room wants, also behind the one that has none.
"""

from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTBigCodeConfig,
    StoppingCriteria,
)

from specattn.decoding import METHODS, Target, generate
from specattn.decoding.passes.cached_model import learned_positions
from tests.decoding.models import VOCABULARY, decisive, greedy_by_transformers, prompts, tiny_model

WITHOUT_DRAFTER = [n for n, method in METHODS.items() if not hasattr(method, "drafter")]
LEARNED = 60
TEXTS = prompts([LEARNED - 12, 6, 30])
OWN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": VOCABULARY}
SHAPE = {"n_positions": LEARNED, "n_embd": 32, "n_layer": 2, "n_head": 4}
CONFIGS = {
    "gpt2": GPT2Config(**SHAPE, **OWN),
    "gpt_bigcode": GPTBigCodeConfig(**SHAPE, **OWN),
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


def learned(family):
    torch.manual_seed(0)
    return decisive(AutoModelForCausalLM.from_config(CONFIGS[family]).eval())


class Ends(StoppingCriteria):
    """Ends a text at a length that nothing else knows."""

    def __init__(self, length):
        self.length = length

    def __call__(self, ids, scores, **_):
        return torch.full((len(ids),), ids.shape[1] >= self.length)


def turning():
    return tiny_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=LEARNED)


@cache
def by_transformers(make, length, *arguments):
    """Return how transformers continues `TEXTS` with a model made by a function: once for all."""
    model = make(*arguments)
    return [greedy_by_transformers(model, x, length - len(x)) for x in TEXTS]


@pytest.mark.filterwarnings("ignore:.*through its own, slower modules")
@pytest.mark.parametrize("name", WITHOUT_DRAFTER)
@pytest.mark.parametrize(
    ("family", "length"),
    # The last token of a text is not read, so it needs no position.
    [("gpt2", LEARNED + 1), ("gpt_bigcode", LEARNED)],
)
def test_drafts_end_where_learned_positions_do(family, length, name):
    if (family, name) == ("gpt2", "cast"):
        pytest.skip("its layers are no linear ones")
    model = learned(family)
    assert learned_positions(model) == LEARNED
    output = generate(model, TEXTS, name, max_length=length)
    assert output.new_tokens == by_transformers(learned, length, family)


@pytest.mark.filterwarnings("ignore:.*through its own, slower modules")
@pytest.mark.parametrize("name", ["plain", "suffix", "token_recycling"])
def test_a_text_may_end_by_itself_before_learned_positions_do(name):
    """It says that it may be longer than they reach; where it is, the error names them."""
    model, (text,) = learned("gpt2"), prompts([LEARNED - 12])
    expected = greedy_by_transformers(model, text, 13)
    for new in (9, 12, 13):
        output = generate(
            model, text, name, max_length=LEARNED + 40, stopping_criteria=[Ends(len(text) + new)]
        )
        assert output.new_tokens == [expected[:new]]
    with pytest.raises(ValueError, match=f"learned {LEARNED} positions; request 0 needs"):
        generate(model, text, name, max_length=LEARNED + 40)
    (longer,) = prompts([LEARNED + 2])
    with pytest.raises(ValueError, match=f"learned {LEARNED} positions; a prompt needs"):
        generate(model, longer, name, max_new_tokens=1)


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("name", WITHOUT_DRAFTER)
def test_room_for_drafts_turns_no_rope(name, compile):
    """A rope that turns with the length counts the longest text, not the room behind it."""
    model = turning()
    output = generate(model, TEXTS, name, max_length=LEARNED + 1, compile=compile)
    assert output.new_tokens == by_transformers(turning, LEARNED + 1)
    with pytest.raises(ValueError, match=f"beyond {LEARNED} tokens.*may read {LEARNED + 1}"):
        generate(model, TEXTS, name, max_length=LEARNED + 2, compile=compile)


@torch.no_grad()
def test_positions_are_held_at_the_longest_text_in_every_runner():
    """Recorded passes look angles up, modules are given positions: rows are the same."""
    model = tiny_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=40)
    (text,) = prompts([39])
    found = []
    for compile in ("on", "off"):
        target = Target(model, 1, 60, compile, longest=40)
        target.prefill([text], 16)
        plan = target.plan(6)
        assert plan.positions.tolist() == [[39] * 6]
        found.append(target.runner.run(plan, text[None, :6]).logits)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
