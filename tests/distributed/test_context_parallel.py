"""A text over several ranks is the text of one."""

from functools import partial

import pytest
import torch

from specattn.decoding import generate
from tests import covering
from tests.decoding.models import CONFIGS, prompts, tiny_model
from tests.decoding.settings import NAMES
from tests.distributed.decoding import LENGTHS, NEW_TOKENS, texts, vegas_per_head

SOME = ("plain", "suffix", "vegas", "longspec-tree", "prompt_lookup")
BLOCK = 4  # so that even short texts lie on all ranks
FAMILIES = [family for family in CONFIGS if family != "mistral-sliding"]  # where all layers slide


@pytest.fixture(autouse=True)
def _one_thread():
    """Compute as the ranks do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_over_8_bits(ties, found, one, kv_dtype):
    """Check texts by family and method: those of plain decoding on one rank, but for near-ties."""
    for (family, _), own in found.items():
        options = {"max_new_tokens": NEW_TOKENS, "kv_dtype": kv_dtype}
        plain = partial(generate, tiny_model(family), prompts(LENGTHS), "plain", **options)
        ties.check(own, one[family, "plain"], plain)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_greedy_texts_of_two_ranks_are_those_of_one(two_ranks, family):
    one = texts([family], SOME, None)
    assert two_ranks(texts, [family], SOME, BLOCK) == [one, one]


def test_sampled_texts_of_two_ranks_are_those_of_one(two_ranks):
    options = {"temperature": 1.0, "seed": 3, "top_k": 0}
    one = texts(["qwen3"], SOME, None, options)
    assert two_ranks(texts, ["qwen3"], SOME, BLOCK, options) == [one, one]


@covering.each("family, kv_dtype", ["qwen3", "gpt_oss"], ["fp8", "int8"])
def test_over_caches_of_8_bits_texts_of_two_ranks_are_those_of_one(
    two_ranks, rounding_ties, family, kv_dtype
):
    one = texts([family], SOME, None, {"kv_dtype": kv_dtype})
    check_over_8_bits(rounding_ties, one, one, kv_dtype)
    first, second = two_ranks(texts, [family], SOME, BLOCK, {"kv_dtype": kv_dtype})
    assert first == second
    check_over_8_bits(rounding_ties, first, one, kv_dtype)


def test_over_a_cache_of_8_bits_modules_and_recordings_of_ranks_agree(two_ranks):
    options = {"kv_dtype": "int8", "compile": "off", "temperature": 1.0, "seed": 3, "top_k": 0}
    one = texts(["qwen3"], SOME, None, options)
    for compile in ("off", "on"):
        assert two_ranks(texts, ["qwen3"], SOME, BLOCK, options | {"compile": compile}) == [one] * 2


def test_two_ranks_select_for_each_head_what_one_selects(two_ranks):
    for kv_dtype in (None, "int8"):
        one = vegas_per_head(None, kv_dtype)
        assert two_ranks(vegas_per_head, BLOCK, kv_dtype) == [one, one]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_methods_say_on_several_ranks_what_they_say_on_one(
    request, rounding_ties, size, family
):
    ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[size])
    one = texts([family], NAMES, None)
    assert ranks(texts, [family], NAMES, BLOCK) == [one] * size
    one = texts([family], NAMES, None, {"kv_dtype": "int8"})
    found = ranks(texts, [family], NAMES, BLOCK, {"kv_dtype": "int8"})
    assert found == [found[0]] * size
    check_over_8_bits(rounding_ties, found[0], one, "int8")
