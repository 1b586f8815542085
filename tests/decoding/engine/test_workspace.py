"""What a run computes in serves the next one: nothing is recorded twice, and no text changes."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from transformers import StoppingCriteria

from specattn.decoding import generate, release
from specattn.decoding.engine import target as targets
from specattn.decoding.engine.target import Target
from specattn.decoding.model.model import Model
from tests.decoding.models import prompts, tiny_model
from tests.decoding.settings import NAMES, settings_of, settings_without_layers

TEXTS = prompts([5, 19, 12])
SETTINGS = {"max_new_tokens": 20, "temperature": 0}


def texts_of(model, method="plain", texts=TEXTS, **options):
    return generate(model, texts, method, **{**SETTINGS, **options}).new_tokens


def kept(model):
    """Return the workspace that the next run may take."""
    found = Model.of(model).take()
    if found is not None:
        Model.of(model).give_back(found)
    return found


def check_second_run(name, recordings, **options):
    model, fresh = tiny_model(), tiny_model()
    method, own = settings_of(model)[name], settings_of(fresh)[name]
    first = texts_of(model, method, **options)
    count = len(recordings)
    assert count > 0
    assert texts_of(model, method, **options) == first
    assert len(recordings) == count, "something was recorded again"
    other = prompts([16, 3, 8], seed=4)
    found = texts_of(model, method, texts=other, **options)
    assert found == texts_of(fresh, own, texts=other, **options)


SIZED = {"auto", "suffix-sized"}  # by times, so no two runs have the same sizes
ANEW = {"triforce-hierarchy", "mtp"}  # each run has its own small target, its own reading of a head
FIXED = [name for name in NAMES if name not in SIZED | ANEW]


@pytest.mark.parametrize("name", FIXED)
def test_a_second_run_records_nothing(name, recordings):
    check_second_run(name, recordings)


@pytest.mark.parametrize("name", ["longspec-chain", "vegas", "suffix", "tokenswift"])
def test_a_second_run_of_drawn_tokens_records_nothing(name, recordings):
    """A chain is drawn by a step in Python, which is the run's own."""
    check_second_run(name, recordings, temperature=0.9, do_sample=True, seed=5)


class EndsAtOnce(StoppingCriteria):
    """Ends texts long before they need the room that was made for them."""

    def __call__(self, ids, scores, **_):
        return torch.ones(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("name", FIXED)
def test_a_cache_with_more_room_changes_no_draft(name):
    model, fresh = tiny_model(), tiny_model()
    method, own = settings_of(model)[name], settings_of(fresh)[name]
    texts_of(model, method, max_new_tokens=70, stopping_criteria=[EndsAtOnce()])
    longer = kept(model)
    found = generate(model, TEXTS, method, **SETTINGS)
    assert kept(model) is longer
    expected = generate(fresh, TEXTS, own, **SETTINGS)
    assert kept(fresh).cache.capacity < longer.cache.capacity
    assert found.new_tokens == expected.new_tokens
    assert figures(found) == figures(expected)


CAPTURED = [
    *("plain", "suffix", "vegas", "longspec-tree", "longspec-chain", "poss", "eagle3"),
    *("medusa", "tokenswift"),
]


@pytest.mark.parametrize("name", CAPTURED)
def test_a_second_run_captures_nothing(name, recordings, captured):
    check_second_run(name, recordings, max_new_tokens=8)


@pytest.mark.parametrize("name", ["longspec-tree", "poss", "medusa", "dflash"])
def test_a_drafter_that_was_changed_or_replaced_is_read_anew(name, recordings):
    model, fresh = tiny_model(), tiny_model()
    method, own = (settings_of(one)[name] for one in (model, fresh))
    drafted = generate(model, TEXTS, method, **SETTINGS)
    for one in (method, own):
        with torch.no_grad():
            for x in one.drafter.parameters():
                x.mul_(-0.7)
    count = len(recordings)
    found, expected = (
        generate(one, TEXTS, drafting, **SETTINGS)
        for one, drafting in ((model, method), (fresh, own))
    )
    assert found.new_tokens == expected.new_tokens == drafted.new_tokens
    assert len(recordings) > count
    assert figures(found) == figures(expected)
    again = generate(
        model, TEXTS, replace(method, drafter=copy.deepcopy(method.drafter)), **SETTINGS
    )
    assert figures(again) == figures(expected)


def figures(output):
    return [(one.drafted, one.accepted, one.rounds) for one in output.statistics.requests]


def test_what_a_run_does_not_use_is_dropped():
    """The last run's drafter alone has memory, which is freed with what else is kept."""
    model = tiny_model()
    methods = settings_of(model)
    for name in ("poss", "longspec-tree", "plain"):
        output = generate(model, TEXTS, methods[name], **SETTINGS)
        block = kept(model).nbytes - output.statistics.cache_bytes
        assert (block > 0) == (name != "plain")
    texts_of(model, methods["poss"])
    memory = weakref.ref(next(iter(kept(model)._beside.values())).memory.text)
    texts_of(model, methods["medusa"])
    assert memory() is None


def test_two_drafters_of_a_kind_have_each_their_own():
    made, space = iter("abc"), kept_of_a_run()
    owner = torch.nn.Linear(2, 2)
    recall = lambda: space.recall("kind", owner, lambda: next(made))  # noqa: E731
    assert [recall(), recall()] == ["a", "b"]
    space.end_run()
    assert recall() == "a"
    space.end_run()
    space.end_run()
    assert recall() == "c"


def kept_of_a_run():
    model = tiny_model()
    texts_of(model)
    return kept(model)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_does_not_keep_the_model(name):
    model = tiny_model()
    texts_of(model, settings_of(model)[name])
    assert kept(model) is not None
    gone = weakref.ref(model), weakref.ref(kept(model))
    del model
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_requests_that_end_early_are_there_again(recordings):
    model = tiny_model()
    long = texts_of(model)
    ends = {"eos_token_id": long[1][4]}
    first, count = texts_of(model, **ends), len(recordings)
    assert len({len(text) for text in first}) > 1
    assert texts_of(model, **ends) == first
    assert texts_of(model) == long
    assert len(recordings) == count


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_states_and_latents_begin_anew(family, recordings):
    model = tiny_model(family)
    method = settings_without_layers(model)["suffix"]
    first, count = texts_of(model, method), len(recordings)
    assert texts_of(model, method) == first
    assert len(recordings) == count


def test_a_shorter_run_borrows_a_longer_one_does_not(recordings):
    model = tiny_model()
    texts_of(model)
    first, count = kept(model), len(recordings)
    short = prompts([2, 3, 9], seed=3)
    expected = texts_of(tiny_model(), texts=short)
    count = len(recordings)
    assert texts_of(model, texts=short) == expected
    assert kept(model) is first
    assert len(recordings) == count
    texts_of(model, max_new_tokens=40)
    second = kept(model)
    assert second is not first
    assert second.cache.capacity == 60 * 5 // 4  # what is outgrown is outgrown by a quarter
    texts_of(model, max_new_tokens=50)
    assert kept(model) is second
    texts_of(model, texts=prompts([1, 1, 1]), max_new_tokens=4)  # 5 of 75 tokens are too few
    assert kept(model).cache.capacity < 10


def test_a_window_that_a_longer_cache_has_is_no_other_texts():
    model = tiny_model("qwen3-sliding")
    window = model.config.sliding_window
    long = texts_of(model, max_new_tokens=window)
    assert len(set(kept(model).windows)) > 1
    few = {"texts": prompts([4, 2, 3]), "max_new_tokens": window - 6}
    assert texts_of(model, **few) == texts_of(tiny_model("qwen3-sliding"), **few)
    assert set(kept(model).windows) == {None}
    assert texts_of(model, max_new_tokens=window) == long


@pytest.mark.parametrize(
    "other",
    [{"compile": "off"}, {"kv_dtype": "int8"}, {"texts": TEXTS[:2]}],
    ids=["compile", "kv_dtype", "batch"],
)
def test_what_does_not_fit_is_gone_before_another_is_made(other, monkeypatch):
    model = tiny_model()
    texts_of(model)
    gone, alive = weakref.ref(kept(model).cache), []
    make = targets.new_cache

    def new_cache(*arguments, **options):
        gc.collect()
        alive.append(gone())
        return make(*arguments, **options)

    monkeypatch.setattr(targets, "new_cache", new_cache)
    expected = texts_of(tiny_model(), **other)
    alive.clear()
    assert texts_of(model, **other) == expected
    assert alive == [None]


def test_an_error_in_mid_run_leaves_nothing():
    model = tiny_model()
    expected = texts_of(model, "suffix")

    def fail(request, tokens):
        raise RuntimeError("of the listener")

    with pytest.raises(RuntimeError, match="of the listener"):
        texts_of(model, "suffix", on_tokens=fail)
    assert kept(model) is None
    assert texts_of(model, "suffix") == expected


def test_a_run_within_a_run_has_its_own():
    model, inside = tiny_model(), []
    expected = texts_of(model)

    def again(request, tokens):
        if not inside:
            inside.append(None)
            inside.append(texts_of(model))

    assert texts_of(model, on_tokens=again) == expected
    assert inside[1] == expected


def test_two_threads_never_share_one(monkeypatch):
    model, used, both = tiny_model(), [], Barrier(2)
    expected = texts_of(model)
    begin = Target.in_use

    def in_use(self):
        used.append(self.workspace)
        both.wait(timeout=60)
        return begin(self)

    monkeypatch.setattr(Target, "in_use", in_use)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(lambda _: texts_of(model), range(2))) == [expected] * 2
            assert used[-1] is not used[-2]
    assert kept(model) in used[-2:]


def test_release_frees_what_is_kept_and_says_how_much():
    model = tiny_model()
    assert release(model) == 0
    output = generate(model, TEXTS, "plain", **SETTINGS)
    cache = weakref.ref(kept(model).cache)
    assert release(model) == output.statistics.cache_bytes > 0
    assert cache() is None
    assert release(model) == 0
    assert texts_of(model) == output.new_tokens
