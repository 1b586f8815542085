"""A text of a model that is divided over ranks by transformers' plan is the text of one rank."""

import pytest
import torch

from specattn.decoding import METHODS
from specattn.decoding.engine.target import Target
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.distributed import TensorParallel
from tests.decoding.models import is_recorded, tiny_model
from tests.decoding.settings import NAMES, settings_without_layers
from tests.distributed.decoding import loaded, saved, texts_of_parts, texts_of_whole

SOME = ("plain", "suffix", "vegas", "longspec-tree", "triforce")
BLOCK = 4


@pytest.fixture(autouse=True)
def _one_thread():
    """Compute as the ranks do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_greedy_texts_of_a_divided_model_are_those_of_the_whole(two_ranks, tmp_path):
    folder = saved("qwen3", tmp_path)
    one = texts_of_whole(folder, SOME)
    assert two_ranks(texts_of_parts, folder, SOME, 2, BLOCK) == [one, one]


def test_sampled_texts_of_a_divided_model_are_those_of_the_whole(two_ranks, tmp_path):
    folder, options = saved("qwen3", tmp_path), {"temperature": 1.0, "seed": 3, "top_k": 0}
    one = texts_of_whole(folder, SOME, options)
    assert two_ranks(texts_of_parts, folder, SOME, 2, BLOCK, options) == [one, one]


# gpt_oss' plan leaves attention whole on every rank, Phi-3's and OLMo 2's gather its heads.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_oss", "gemma2", "olmo2", "qwen3_moe"])
def test_all_methods_say_of_a_divided_model_what_they_say_of_the_whole(two_ranks, tmp_path, family):
    folder = saved(family, tmp_path)
    one = texts_of_whole(folder, NAMES)
    assert two_ranks(texts_of_parts, folder, NAMES, 2, BLOCK) == [one, one]


@pytest.mark.slow
def test_a_model_with_fused_projections_is_divided(two_ranks, tmp_path):
    folder = saved("phi3", tmp_path)
    names = tuple(settings_without_layers(tiny_model("phi3")))
    one = texts_of_whole(folder, names)
    assert two_ranks(texts_of_parts, folder, names, 2, BLOCK) == [one, one]


@pytest.mark.slow
def test_all_methods_say_the_same_where_cache_and_model_are_divided(four_ranks, tmp_path):
    folder = saved("qwen3", tmp_path)
    one = texts_of_whole(folder, NAMES)
    assert four_ranks(texts_of_parts, folder, NAMES, 2, BLOCK) == [one] * 4


@pytest.mark.slow
def test_four_parts_of_a_model(four_ranks, tmp_path):
    folder = saved("qwen3", tmp_path, num_key_value_heads=4)
    one = texts_of_whole(folder, SOME)
    assert four_ranks(texts_of_parts, folder, SOME, 4, BLOCK) == [one] * 4


def what_a_rank_holds(folder):
    """Return the size of a rank's cache, and what it selects by its own and by all scores."""
    model = loaded(folder, 2)
    target = Target(model, 1, 100)
    tensor = TensorParallel.of(model)
    scores = torch.tensor([1.0 + 2 * tensor.rank, -torch.inf])
    assert is_recorded(target)  # passes are recorded, the exchanges in them
    return target.cache.nbytes, target.q_heads, tensor.mean(scores).tolist(), tensor.rank


def test_a_rank_holds_its_heads_and_averages_scores_over_all(two_ranks, tmp_path):
    folder = saved("qwen3", tmp_path)
    whole = Target(load_causal_model(folder, torch.float32), 1, 100)
    for rank, found in enumerate(two_ranks(what_a_rank_holds, folder)):
        assert found == (whole.cache.nbytes // 2, whole.q_heads // 2, [2.0, -torch.inf], rank)


def refused(folder):
    with pytest.raises(ValueError, match="multiple of so many heads") as raised:
        Target(loaded(folder, 2), 1, 100)
    return str(raised.value)


def test_heads_that_cannot_be_divided_are_refused(two_ranks, tmp_path):
    folder = saved("qwen3", tmp_path, num_attention_heads=3, num_key_value_heads=3)
    assert all("got 3 query and 3 KV heads" in found for found in two_ranks(refused, folder))


def vegas_texts(folder, **options):
    from specattn.decoding import generate
    from tests.distributed.decoding import LENGTHS, NEW_TOKENS, prompts

    method = METHODS["vegas"](gamma=3, ratio=0.5, min_tokens=2, switch=False, **options)
    model = loaded(folder, 2) if torch.distributed.is_initialized() else loaded(folder)
    return generate(model, prompts(LENGTHS), method, max_new_tokens=NEW_TOKENS).new_tokens


def vegas_texts_either_way(folder):
    return [
        vegas_texts(folder, mean_over_ranks=False),
        vegas_texts(folder, per_head=True),
    ]


def test_vegas_may_rank_by_each_ranks_own_heads(two_ranks, tmp_path):
    folder = saved("qwen3", tmp_path)
    one = vegas_texts(folder)
    assert two_ranks(vegas_texts_either_way, folder) == [[one, one]] * 2


def test_without_ranks_a_model_cannot_be_divided(tmp_path):
    with pytest.raises(ValueError, match="2 parts of a model need 2 ranks"):
        load_causal_model(saved("qwen3", tmp_path), torch.float32, tensor_parallel=2)
