"""transformers' own generate gives eager attention's texts, whatever its cache and strategy."""

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from specattn.decoding import Vegas, generate
from specattn.integrations.transformers import Cache
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model
from tests.integrations.transformers.models import FAMILIES, LEFT, eager, ours, padded

pytestmark = pytest.mark.filterwarnings(f"error:.*{LEFT}")

STRATEGIES = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "no-cache": {"use_cache": False},
}


def texts(model, ids, mask, **options):
    torch.manual_seed(0)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=mask, **options)


def cases():
    """Yield families with strategies: two of these in all families, all in two are quick."""
    for family, strategy in product(FAMILIES, STRATEGIES):
        quick = strategy in ("greedy", "static") or family in ("qwen2-sliding", "gpt_oss")
        marks = () if quick else pytest.mark.slow
        yield pytest.param(family, strategy, marks=marks)


@pytest.mark.parametrize(("family", "strategy"), list(cases()))
def test_generate(family, strategy, poisoned_empty):
    model, (ids, mask) = tiny_model(family), padded((9, 17, 14))
    options = STRATEGIES[strategy]
    expected = texts(eager(model), ids, mask, **options)
    assert torch.equal(texts(ours(model), ids, mask, **options), expected)
    if not {"use_cache", "cache_implementation"} & options.keys():
        found = texts(model, ids, mask, past_key_values=Cache(model.config), **options)
        assert torch.equal(found, expected)


def families_and_caches():
    """Yield both caches in all families; transformers' own is quick in two."""
    for family in FAMILIES:
        yield pytest.param(family, True, id=f"{family}-own")
        marks = () if family in ("qwen2-sliding", "gpt_oss") else pytest.mark.slow
        yield pytest.param(family, False, id=f"{family}-dynamic", marks=marks)


@pytest.mark.parametrize(("family", "own"), list(families_and_caches()))
def test_assisted(family, own, poisoned_empty):
    """The cache is cropped after every verification of several rows."""
    model, assistant = tiny_model(family), ours(tiny_model(family, seed=1))
    # With a token for padding transformers takes it for that in the assistant's prompt too.
    (ids, mask), no_pads = padded((23,)), {"pad_token_id": None}
    for helper in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        cache = {"past_key_values": Cache(model.config)} if own else {}
        expected = texts(eager(model), ids, mask, **no_pads)
        assert torch.equal(texts(ours(model), ids, mask, **helper, **cache, **no_pads), expected)


def test_a_prefix_that_is_continued_twice(poisoned_empty):
    model, (ids, mask) = ours(tiny_model("qwen3")), padded((30,))
    prefix = Cache(model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=prefix)
    expected = texts(eager(model), ids, mask)
    for _ in range(2):
        kept = copy.deepcopy(prefix)
        assert torch.equal(texts(ours(model), ids, mask, past_key_values=kept), expected)
    assert prefix.get_seq_length() == 20


@pytest.mark.parametrize("method", ["plain", Vegas(gamma=2, min_tokens=4, switch=False)])
def test_under_the_decode_layer(method):
    """A pass with a plan is the decode layer's, every other call ours: one model serves both."""
    model, lengths = tiny_model("qwen3"), [7, 12, 30]
    expected = [greedy_by_transformers(eager(model), text, 16) for text in prompts(lengths)]
    ours(model)

    def run(number):
        text = prompts(lengths)[number % 3]
        if number % 2:
            return greedy_by_transformers(model, text, 16)
        return generate(model, [text], method, max_new_tokens=16).new_tokens[0]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, range(18)))
    assert found == [expected[number % 3] for number in range(18)]


def test_compiled():
    """Our functions stay out of the graph, so a compiled model runs them as they are."""
    model, (ids, mask) = ours(tiny_model("mistral-sliding", num_hidden_layers=1)), padded((9, 14))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(compiled(ids, attention_mask=mask).logits, expected)
