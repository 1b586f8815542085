"""The embedded drafters, which have learnt: texts are plain decoding's, and its distribution's."""

import pytest
import torch
from tests import distributions
from tests.examples.test_drafter import HEADS, PROMISED, TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import METHODS, generate

SETTINGS = {
    "longspec": {"widths": (2, 3, 3)},
    "medusa": {"widths": (3, 2)},
    "tokenswift": {"widths": (1, 2, 2)},
}
PROMPT, COPIES, NEW_TOKENS, CELLS = 32, 128, 8, 20


def methods(quick=("dflash", "jetflow")):
    """Yield every method with an embedded drafter; JetFlow's is DFlash's."""
    for name in (*PROMISED, "jetflow", *HEADS):
        yield pytest.param(name, marks=() if name in quick else pytest.mark.slow)


def method_of(name):
    """Return a method with its embedded drafter, that drafts in every round."""
    return METHODS[name](**SETTINGS.get(name, {"total_tokens": 16}))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def texts():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = (TINY / "measure_drafter.py").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    return [ids[:500], ids[200:460]]


@pytest.mark.parametrize("name", list(methods()))
def test_the_text_is_that_of_plain_decoding(model, texts, name):
    greedy, seeded = {"temperature": 0.0}, {"temperature": 1.0, "top_k": 0, "seed": 5}
    for sampling in (greedy, seeded):
        plain = generate(model, texts, "plain", max_new_tokens=48, **sampling)
        found = generate(model, texts, method_of(name), max_new_tokens=48, **sampling)
        assert found.new_tokens == plain.new_tokens
        assert found.statistics.total.accepted > 10


@pytest.mark.parametrize("name", list(methods(quick=("dflash",))))
def test_sampled_text_has_the_targets_distribution(model, texts, name):
    """Where a token falls among the target's, the likelier ones first, is uniform."""
    prompt = texts[1][64 - PROMPT : 64]
    sampling = {"temperature": 1.0, "top_k": 0, "seed": 1}
    output = generate(
        model, prompt.expand(COPIES, -1), method_of(name), max_new_tokens=NEW_TOKENS, **sampling
    )
    assert output.statistics.total.accepted > COPIES // 2
    assert uniform(model, prompt, output.new_tokens) > distributions.SIGNIFICANCE


def test_the_test_would_notice_another_temperature(model, texts):
    prompt = texts[1][64 - PROMPT : 64]
    sampling = {"temperature": 0.8, "top_k": 0, "seed": 1}
    output = generate(
        model, prompt.expand(COPIES, -1), "plain", max_new_tokens=NEW_TOKENS, **sampling
    )
    assert uniform(model, prompt, output.new_tokens) < 1e-6


@torch.no_grad()
def uniform(model, prompt, new_tokens):
    """Return the chi-square probability that tokens are the target's own, by transformers."""
    new = torch.tensor(new_tokens)
    rows = torch.cat([prompt.expand(len(new), -1), new], 1)
    logits = model(rows[:, :-1], logits_to_keep=NEW_TOKENS).logits
    chances, order = logits.double().softmax(-1).sort(dim=-1, descending=True)
    rank = (order == new[..., None]).long().argmax(-1, keepdim=True)
    own, upto = chances.gather(-1, rank), chances.cumsum(-1).gather(-1, rank)
    generator = torch.Generator().manual_seed(0)
    within = torch.rand(own.shape, dtype=torch.float64, generator=generator)
    place = ((upto - within * own) * CELLS).long().clamp(0, CELLS - 1)
    return distributions.p_value(place.flatten(), torch.full((CELLS,), 1 / CELLS).double())
