"""A text over several ranks is the text of one."""

import pytest
import torch

from tests.decoding.models import CONFIGS
from tests.decoding.settings import NAMES
from tests.distributed.decoding import texts, vegas_per_head

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


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_greedy_texts_of_two_ranks_are_those_of_one(two_ranks, family):
    one = texts([family], SOME, None)
    assert two_ranks(texts, [family], SOME, BLOCK) == [one, one]


def test_sampled_texts_of_two_ranks_are_those_of_one(two_ranks):
    options = {"temperature": 1.0, "seed": 3, "top_k": 0}
    one = texts(["qwen3"], SOME, None, options)
    assert two_ranks(texts, ["qwen3"], SOME, BLOCK, options) == [one, one]


def test_two_ranks_select_for_each_head_what_one_selects(two_ranks):
    one = vegas_per_head(None)
    assert two_ranks(vegas_per_head, BLOCK) == [one, one]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_methods_say_on_several_ranks_what_they_say_on_one(request, size, family):
    ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[size])
    one = texts([family], NAMES, None)
    assert ranks(texts, [family], NAMES, BLOCK) == [one] * size
