"""Every figure from its definition, on rounds written by hand and on a real run."""

import json

import pytest
import torch

from specattn.decoding import (
    Plain,
    PromptLookup,
    RequestStatistics,
    Round,
    Statistics,
    Vegas,
    generate,
)
from specattn.decoding.text.rounds import PassTimes, by_drafter
from specattn.decoding.text.statistics import Clock, Stopwatch
from tests.decoding.engine.test_loop import StopAt
from tests.decoding.fake_gpu import FakeGPU
from tests.decoding.models import prompts, tiny_model


def written_by_hand():
    """Return six rounds: a root alone, five drafts of three tokens, the last one cut off."""
    request = RequestStatistics(prompt_tokens=10)
    request.record(Round(0, 0, 0, [0] * 1))
    for accepted in (3, 0, 1, 3):
        request.record(Round(3, 3, accepted, [0] * (accepted + 1)))
    request.record(Round(3, 3, 2, [0] * 1))
    return request


def test_counts():
    request = written_by_hand()
    assert request.rounds == 6
    assert request.drafted == 15
    assert request.accepted == 9
    assert request.new_tokens == 1 + 4 + 1 + 2 + 4 + 1
    assert request.discarded == 2
    assert request.new_tokens == request.accepted + request.rounds - request.discarded


def test_rates():
    request = written_by_hand()
    assert request.mean_acceptance_length == 1 + 9 / 6
    assert request.acceptance_rate == 9 / 15
    assert request.position_rates == [4 / 6, 3 / 6, 2 / 6]  # of all rounds
    assert request.conditional_rates == [4 / 5, 3 / 4, 2 / 3]  # of those that came so far


def test_nothing_counted_is_zero_not_an_error():
    request = RequestStatistics()
    assert request.mean_acceptance_length == 1
    assert request.acceptance_rate == 0
    assert request.position_rates == request.conditional_rates == []
    assert Statistics([]).tokens_per_second == 0


def test_totals_weigh_rounds_alike():
    other = RequestStatistics(prompt_tokens=4)
    other.record(Round(5, 4, 4, [0] * 5))
    total = Statistics([written_by_hand(), other]).total
    assert total.prompt_tokens == 14
    assert total.rounds == 7
    assert total.position_rates == [5 / 7, 4 / 7, 3 / 7, 1 / 7]
    assert total.conditional_rates == [5 / 6, 4 / 5, 3 / 4, 1]


def test_a_run_adds_up():
    texts = prompts([5, 23, 40])
    output = generate(
        tiny_model("llama"),
        texts,
        Vegas(gamma=3, ratio=0.7, min_tokens=4, switch=False),
        max_new_tokens=40,  # drafts know this end, and become shorter before it
        stopping_criteria=[StopAt({int(text[0]): len(text) + 20 for text in texts})],
    )
    statistics = output.statistics
    for request, new in zip(statistics.requests, output.new_tokens, strict=True):
        assert request.new_tokens == len(new) == 20
        assert request.new_tokens == request.accepted + request.rounds - request.discarded
        assert request.accepted == sum(request.accepted_at)
        assert request.drafted == 3 * (request.rounds - 1)
        assert request.offered_at[0] == request.rounds - 1
        assert request.offered_at[1:] == request.accepted_at[:-1]
    assert statistics.passes == max(request.rounds for request in statistics.requests)
    assert statistics.tokens_per_second == 60 / statistics.decode_seconds
    parts = (statistics.draft_seconds, statistics.target_seconds, statistics.accept_seconds)
    assert min(*parts, statistics.prefill_seconds) > 0
    assert sum(parts) == statistics.decode_seconds


def test_rounds_say_where_every_token_comes_from():
    assert Round(0, 0, 0, [7]).sources == ["own"]
    assert Round(3, 3, 2, [7, 8, 9]).sources == ["drafted", "drafted", "corrected"]
    assert Round(3, 3, 3, [7, 8, 9, 6]).sources == ["drafted"] * 3 + ["own"]
    assert Round(3, 3, 2, [7]).sources == ["drafted"], "the others came after the end of the text"


def test_the_history_of_a_run_is_what_its_figures_count():
    model, texts = tiny_model("llama"), prompts([9, 40, 21])
    heard = [[], [], []]
    statistics = generate(
        model, texts, PromptLookup(gamma=3), max_new_tokens=20,
        on_round=lambda request, one: heard[request].append(one),
    ).statistics  # fmt: skip
    for request, own in zip(statistics.requests, heard, strict=True):
        again = RequestStatistics(request.prompt_tokens)
        for one in own:
            again.record(one)
        assert request == again
        sources = [source for one in own for source in one.sources]
        assert sources.count("drafted") + request.discarded >= request.accepted
        assert len(sources) == 20
    assert len(statistics.times) == statistics.passes
    parts = [sum(part) for part in zip(*statistics.times, strict=True)]
    assert parts[0] + parts[3] == pytest.approx(statistics.draft_seconds)
    assert parts[1:3] == pytest.approx([statistics.target_seconds, statistics.accept_seconds])


def test_figures_by_drafter():
    times = [PassTimes(1.0, 2.0, 0.5, 0.5), PassTimes(0.0, 2.0, 0.0, 0.0)]
    first = [Round(3, 3, 2, [1, 2, 3], "vegas"), Round(0, 0, 0, [4])]
    second = [Round(2, 2, 1, [1, 2], "suffix"), Round(4, 2, 2, [3, 4, 5])]
    found = by_drafter([first, second], times, "own")
    assert found["rounds"] == {"vegas": 1, "none": 1, "suffix": 1, "own": 1}
    assert found["tokens per round"] == {"vegas": 3, "none": 1, "suffix": 2, "own": 3}
    assert found["ms per round"] == {"vegas": 4000, "none": 2000, "suffix": 4000, "own": 2000}
    assert found["rounds by drafter"] == "vegas 25%, none 25%, suffix 25%, own 25%"
    assert json.loads(json.dumps(found)) == found


def test_the_cache_has_room_for_the_run_and_no_more():
    model = tiny_model("llama")
    statistics = generate(model, prompts([9, 40]), "plain", max_new_tokens=8).statistics
    token = 2 * model.config.num_key_value_heads * model.config.head_dim * 4  # float32
    layers = model.config.num_hidden_layers
    assert statistics.cache_bytes == 2 * layers * token * (40 + 8 + Plain().max_nodes)


def test_padding_of_a_batch_of_trees_is_not_drafted():
    """A request's figures are those of a run by itself, whatever its neighbours draft."""
    model, texts = tiny_model("llama"), [torch.tensor([1, 2, 3] * 4), *prompts([12])]
    method, options = PromptLookup(gamma=10), {"max_new_tokens": 12}
    together = generate(model, texts, method, **options).statistics
    alone = [generate(model, p, method, **options).statistics for p in texts]
    assert together.requests == [statistics.requests[0] for statistics in alone]
    assert together.requests[0].drafted != together.requests[1].drafted


def test_json():
    statistics = Statistics([written_by_hand()], 0.5, 1.0, 2.0, 1.0)
    read = json.loads(json.dumps(statistics.to_dict()))
    assert read["tokens_per_second"] == 13 / 4
    assert read["prefill_seconds"] == 0.5
    assert read["mean_acceptance_length"] == read["requests"][0]["mean_acceptance_length"] == 2.5
    assert read["conditional_rates"] == [0.8, 0.75, pytest.approx(2 / 3)]


def test_the_stopwatch_books_every_moment_once(monkeypatch):
    moments = iter([1.0, 2.0, 5.0, 5.5, 9.5])
    monkeypatch.setattr(Clock, "now", lambda self: next(moments))
    watch = Stopwatch(torch.device("cpu"))
    for part in ("draft", "target", "draft", "accept"):
        watch.lap(part)
    assert watch.totals() == {"draft": 1.5, "target": 3.0, "accept": 4.0}


def test_the_stopwatch_of_a_gpu_waits_for_its_last_moment_alone():
    """A wait for the whole device is an error while another thread captures a graph."""
    gpu, device = FakeGPU(), torch.device("cuda", 0)
    with gpu.serving():
        watch = Stopwatch(device)
        watch.lap("draft")
        watch.lap("target")
        assert watch.totals() == {"draft": 0.001, "target": 0.001}
    assert gpu.waits == ["event"]
