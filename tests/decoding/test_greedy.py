"""At temperature 0 every method says token for token what transformers itself says."""

from functools import cache

import pytest
import torch

from specattn.decoding import METHODS as METHODS_BY_NAME
from specattn.decoding import (
    Cast,
    Plain,
    PromptLookup,
    Quest,
    SpecExtend,
    Streaming,
    Suffix,
    TokenRecycling,
    TriForce,
    Vegas,
    generate,
)
from specattn.decoding.engine.target import Target
from tests.decoding import settings
from tests.decoding.models import CONFIGS, greedy_by_transformers, known, prompts, tiny_model
from tests.decoding.pacing import with_free_rows

# What the cache holds beyond a request's length is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

NEW_TOKENS = 24
ON_THE_CACHE = ("vegas", "streaming", "quest", "specextend", "triforce", "triforce-hierarchy")
METHODS = {
    "plain": Plain(),
    "vegas": Vegas(gamma=3, ratio=0.7, min_tokens=4),
    "cast": Cast(gamma=3),
    "streaming": Streaming(gamma=3, ratio=0.7, min_tokens=4, sinks=2),
    "quest": Quest(gamma=3, ratio=0.5, min_tokens=4, page_size=4),
    "specextend": SpecExtend(gamma=3, ratio=0.6, min_tokens=4, chunk_size=4),
    "triforce": TriForce(gamma=3, ratio=0.5, min_tokens=4, chunk_size=4),
    "triforce-hierarchy": TriForce(
        gamma=3,
        ratio=0.5,
        min_tokens=4,
        chunk_size=4,
        draft=tiny_model("llama", seed=9, num_hidden_layers=1),
        draft_gamma=2,
        draft_budget=20,
    ),
    "prompt_lookup": PromptLookup(gamma=5),
    "suffix": Suffix(),
    "token_recycling": TokenRecycling(nodes=9, depth=3),
}


# What a family may do otherwise: passes, selections in its layers, a second model's drafts. Other
# methods draft from texts, or select as one of these does: they meet three kinds of layers.
DIFFERENT = ("plain", "vegas", "quest", "triforce-hierarchy", "suffix")
ALL_METHODS = ("qwen3", "mistral-sliding", "gpt_oss")


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=() if quick else pytest.mark.slow)
        for family in CONFIGS
        for method in METHODS
        for quick in [method in DIFFERENT or family in ALL_METHODS]
    ],
)
def test_a_ragged_batch_equals_transformers(family, method):
    model, texts, expected = known(family, (5, 23, 40), NEW_TOKENS)
    output = generate(model, texts, METHODS[method], max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == expected
    total = output.statistics.total
    if method in ON_THE_CACHE and family != "mistral-sliding":
        assert 0 < total.accepted < total.drafted, "drafts should be neither perfect nor useless"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=() if one in ("qwen3", "gpt_oss") else pytest.mark.slow)
        for one in CONFIGS
    ],
)
def test_one_request_equals_transformers(family, method):
    model, (text,), expected = known(family, (31,), NEW_TOKENS, seed=2)
    output = generate(model, text, METHODS[method], max_new_tokens=NEW_TOKENS)
    assert output.new_tokens == expected
    assert output.sequences[0].tolist() == text.tolist() + output.new_tokens[0]


@pytest.mark.parametrize("method", ON_THE_CACHE)
def test_where_all_layers_slide_there_is_nothing_to_draft_on(method):
    model, method = tiny_model("mistral-sliding"), METHODS[method]
    output = generate(model, prompts([20]), method, max_new_tokens=8)
    assert output.statistics.total.drafted == 0


def test_a_window_longer_than_the_cache_does_not_slide():
    model = tiny_model("mistral-sliding", sliding_window=64)
    (text,) = prompts([20])
    output = generate(model, text, METHODS["vegas"], max_new_tokens=8)
    assert output.new_tokens == [greedy_by_transformers(model, text, 8)]
    assert output.statistics.total.drafted > 0


@pytest.mark.parametrize("text", [[3, 4, 5, 6] * 5, list(range(20))], ids=["again", "new"])
@pytest.mark.parametrize("name", ["vegas", "streaming", "quest", "specextend", "prompt_lookup"])
def test_no_more_is_drafted_than_tokens_are_left(name, text):
    """Of four tokens three may be drafted, for which the cache needs little room."""
    model = tiny_model("qwen3")
    method = METHODS_BY_NAME[name](gamma=3000)
    output = generate(model, text, method, max_new_tokens=4, capacity=len(text) + 8)
    assert output.new_tokens == [greedy_by_transformers(model, torch.tensor(text), 4)]
    request = output.statistics.requests[0]
    assert request.drafted <= 3 + 2 + 1
    assert request.discarded == 0


@cache
def methods_of_one():
    """Return a model, and a method of every kind for it: once for all tests of every method."""
    model = tiny_model("qwen3")
    return model, settings.settings_of(model)


@cache
def plain_text(length, do_sample):
    """Return plain decoding's text behind a prompt of 20 tokens, once for every method."""
    options = {"max_new_tokens": length, "do_sample": do_sample, "seed": 1 if do_sample else None}
    return generate(methods_of_one()[0], prompts([20]), "plain", **options).new_tokens


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", settings.NAMES)
def test_no_path_is_longer_than_the_text_may_still_become(name, do_sample, monkeypatch):
    """One token follows every draft; so trees of a fixed shape lose their last levels, too."""
    with_free_rows(monkeypatch)  # else so short a text is not drafted for
    (model, methods), (text,) = methods_of_one(), prompts([20])
    method, left, depths, verify = methods[name], [6], [], Target.verify
    expected = plain_text(left[0], do_sample)

    def watched(self, tree, *arguments, **options):
        depths.append((int(tree.depths.max()), left[-1] - 1))
        return verify(self, tree, *arguments, **options)

    monkeypatch.setattr(Target, "verify", watched)
    options = {"max_new_tokens": left[0], "do_sample": do_sample, "seed": 1 if do_sample else None}
    output = generate(
        model, text, method, on_tokens=lambda _, new: left.append(left[-1] - len(new)), **options
    )
    assert all(depth <= most for depth, most in depths), depths
    if name not in ("plain", "prompt_lookup"):
        assert max(depths)[0] > 0, "something should have been drafted"
    assert output.statistics.total.discarded == 0
    assert output.new_tokens == expected


@pytest.mark.parametrize(
    ("name", "nodes"), [("medusa", 4), ("tokenswift", 10), ("longspec-tree", 3), ("poss", 4)]
)
def test_a_short_run_needs_no_room_for_deep_trees(name, nodes):
    model, text = tiny_model("qwen3"), list(range(20))
    method = settings.settings_of(model)[name]
    needed = len(text) + 2 + nodes
    output = generate(model, text, method, max_new_tokens=2, capacity=needed)
    assert output.new_tokens == [greedy_by_transformers(model, torch.tensor(text), 2)]
    with pytest.raises(ValueError, match=f"room for {needed}"):
        generate(model, text, method, max_new_tokens=2, capacity=needed - 1)


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_chunks_of_the_prefill_do_not_show(chunk_size):
    model, texts = tiny_model("gpt_oss"), prompts([1, 30, 15])
    output = generate(model, texts, "plain", max_new_tokens=6, prefill_chunk_size=chunk_size)
    assert output.new_tokens == [greedy_by_transformers(model, p, 6) for p in texts]


def test_selecting_everything_makes_every_draft_right():
    """With the whole prefix selected a draft is the target itself: all are accepted."""
    model, texts = tiny_model("qwen3"), prompts([9, 17])
    output = generate(model, texts, Vegas(gamma=3, ratio=1.0, switch=False), max_new_tokens=13)
    assert output.statistics.total.acceptance_rate == 1
    assert output.statistics.total.rounds == 2 * (1 + 3)


def test_more_of_the_prefix_makes_drafts_better():
    model, texts = tiny_model("gpt_oss"), prompts([60, 80])
    accepted = [
        generate(
            model,
            texts,
            Vegas(gamma=3, ratio=ratio, min_tokens=1, switch=False),
            max_new_tokens=16,
        ).statistics.total.acceptance_rate
        for ratio in (0.05, 0.9)
    ]
    assert accepted[0] < accepted[1]


@pytest.mark.parametrize("keep", [{"keep_first": 3}, {"keep_last": 3}])
def test_forced_positions_do_not_change_the_text(keep):
    model, texts = tiny_model("qwen2"), prompts([12, 30])
    method = Vegas(gamma=2, ratio=0.2, min_tokens=4, **keep)
    output = generate(model, texts, method, max_new_tokens=12)
    assert output.new_tokens == [greedy_by_transformers(model, p, 12) for p in texts]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma"),
        ({"ratio": 0.0}, "ratio"),
        ({"ratio": 1.5}, "ratio"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"keep_first": -1}, "keep_first"),
        ({"rows": "first"}, "rows must be one of two, all, last"),
        ({"ranking": "mean"}, "ranking must be one of logit, weight"),
    ],
)
def test_parameters_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Vegas(**options)
