"""Logits processors may return another floating type than they were given, as for transformers."""

from functools import cache

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, MinLengthLogitsProcessor

from specattn.decoding import METHODS, generate
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

WITHOUT_DRAFTER = [n for n, method in METHODS.items() if not hasattr(method, "drafter")]
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NEW_TOKENS = 12


class Bans(LogitsProcessor):
    """Forbids to say a token twice in a row, and answers in a type of its own."""

    def __init__(self, dtype):
        self.dtype, self.given = dtype, set()

    def __call__(self, ids, scores):
        self.given.add(scores.dtype)
        last = torch.nn.functional.one_hot(ids[:, -1], scores.shape[-1]).bool()
        return scores.masked_fill(last, -torch.inf).to(self.dtype)


class Hairs(LogitsProcessor):
    """Makes all tokens as likely but for what float64 alone can tell: a token by the last one."""

    def __call__(self, ids, scores):
        near = torch.ones_like(scores, dtype=torch.float64)
        near[range(len(ids)), (ids[:, -1] * 7 + 3) % scores.shape[-1]] += 1e-13
        return near


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def banned(model):
    """Return how transformers continues texts under the rule in a type, once for all methods."""
    return cache(
        lambda dtype, lengths: by_transformers(
            model, prompts(lengths), LogitsProcessorList([Bans(dtype)])
        )
    )


def by_transformers(model, texts, rules):
    return [greedy_by_transformers(model, x, NEW_TOKENS, logits_processor=rules) for x in texts]


def by_ours(model, texts, name, rules, **options):
    options = {"max_new_tokens": NEW_TOKENS, "logits_processor": rules} | options
    return generate(model, texts, name, **options).new_tokens


@pytest.mark.parametrize(
    ("dtype", "name"),
    [  # half of them have every type, and every method two
        pytest.param(dtype, name, marks=pytest.mark.slow if (t // 2 + n) % 2 else ())
        for t, dtype in enumerate(TYPES)
        for n, name in enumerate(WITHOUT_DRAFTER)
    ],
    ids=str,
)
def test_any_floating_type_is_taken(model, banned, dtype, name):
    texts, rules = prompts([9, 30, 17]), LogitsProcessorList([Bans(dtype)])
    expected = banned(dtype, (9, 30, 17))
    assert by_ours(model, texts, name, rules) == expected
    assert [by_ours(model, [x], name, rules)[0] for x in texts] == expected
    assert by_ours(model, prompts([9, 9, 9]), name, rules) == banned(dtype, (9, 9, 9))


@pytest.mark.parametrize("name", ["plain", "suffix", "token_recycling"])
@pytest.mark.parametrize("lengths", [[30], [9, 30, 17]], ids=str)
def test_the_next_processor_gets_the_type_that_the_last_one_returned(model, name, lengths):
    """Also where it is one of transformers', and where texts stand on a device's side."""
    texts, seen = prompts(lengths), Bans(torch.float64)
    rules = [Bans(torch.bfloat16), MinLengthLogitsProcessor(34, 3, "cpu"), seen]
    rules = LogitsProcessorList(rules)
    expected = by_transformers(model, texts, rules)
    assert seen.given == {torch.bfloat16}
    assert by_ours(model, texts, name, rules) == expected
    assert seen.given == {torch.bfloat16}


@pytest.mark.parametrize("name", ["plain", "suffix", "token_recycling"])
@pytest.mark.parametrize("lengths", [[30], [9, 30, 17]], ids=str)
def test_what_float64_alone_can_tell_decides(model, name, lengths):
    texts, rules = prompts(lengths), LogitsProcessorList([Hairs()])
    expected = by_transformers(model, texts, rules)
    assert len({*expected[0]}) > 3
    assert by_ours(model, texts, name, rules) == expected


@pytest.mark.parametrize(
    "name", ["plain", "suffix", "vegas:rejection=true,switch=false", "triforce"]
)
def test_sampled_texts_are_those_of_float32(model, name):
    """What float64 holds of float32 numbers is these numbers."""
    texts, options = prompts([9, 30]), {"temperature": 1.3, "seed": 5}
    by_type = [
        by_ours(model, texts, name, LogitsProcessorList([Bans(dtype)]), **options)
        for dtype in (torch.float32, torch.float64)
    ]
    assert by_type[0] == by_type[1]
    for dtype in (torch.float16, torch.bfloat16):
        rules = LogitsProcessorList([Bans(dtype)])
        (new, _) = by_ours(model, texts, name, rules, **options)
        assert all(a != b for a, b in zip(new, new[1:], strict=False))
