"""What rounds take: calibrated, followed by little steps, kept for other processes."""

import json
import logging

import numpy as np
import pytest

from specattn.decoding.drafting.costs import PASS, Costs, alike, file_of
from specattn.decoding.drafting.gains import Effort
from tests.decoding.models import tiny_model


def known(**options):
    """Return costs of one request: 10 ms a round that drafts nothing; 16, 19 ms of 4, 8 rows."""
    costs = Costs(**options)
    for seconds in (0.012, 0.010, 0.011):
        costs.follow((PASS, 1), seconds)
    costs.put((PASS, 4), 0.016)
    costs.put((PASS, 8), 0.019)
    return costs


def passes(costs, *rows, **options):
    return costs.of_passes(PASS, np.array(rows), **options).tolist()


def test_sizes_between_known_ones_lie_on_lines():
    costs = known()
    assert passes(costs, 1, 4, 6, 8) == pytest.approx([0.010, 0.016, 0.0175, 0.019])
    assert passes(costs, 12, 17, beyond=2) == pytest.approx([0.022, np.inf])


def test_of_one_size_another_row_takes_a_share():
    costs = Costs()
    assert passes(costs, 1, 4) == [np.inf, np.inf]
    costs.follow((PASS, 2), 0.010)
    assert passes(costs, 1, 2, 4, a_row=0.1) == pytest.approx([0.010, 0.010, 0.011])
    assert costs.of_passes("pass for x", np.array(4), a_row=0.1) == pytest.approx(0.011)


@pytest.mark.parametrize("outlier", [10.0, 1e-9])
@pytest.mark.parametrize("rounds", [5, 50])
@pytest.mark.parametrize("handed_on", [False, True])
def test_no_round_decides_and_many_do(outlier, rounds, handed_on):
    costs = known()
    for _ in range(rounds):
        costs.follow((PASS, 4), 0.016)
    if handed_on:  # to longer texts
        costs = Costs(former=costs)
    for seconds in (outlier, 0.016, outlier):
        costs.follow((PASS, 4), seconds)
        assert 0.016 / 1.2 <= costs.seconds[PASS, 4] <= 0.016 * 1.1
    for _ in range(30):
        costs.follow((PASS, 4), 0.032)
    assert costs.seconds[PASS, 4] == pytest.approx(0.032, rel=0.22), "all together move by fifths"


def test_the_first_round_counts_for_nothing_and_the_fastest_of_two_more_stands():
    """Slow ones, of cold caches, would not be met again, as they are by what was guessed."""
    costs = known()
    guess = passes(costs, 16)[0]
    for seconds, counts in ((0.028, guess), (0.035, guess), (0.030, 0.030), (0.031, 0.030)):
        costs.follow((PASS, 16), seconds)
        assert passes(costs, 16) == pytest.approx([counts])


def test_what_is_faster_than_was_guessed_counts_at_once():
    costs, draft = known(), ("x", Effort(1, 2))
    costs.follow((PASS, 16), 0.020)
    assert passes(costs, 16) == pytest.approx([0.020])
    costs.follow(draft, 0.003, guess=0.002)
    assert draft not in costs.seconds
    costs.follow(draft, 0.001, guess=0.002)
    assert costs.seconds[draft] == pytest.approx(0.001)
    costs = Costs()
    for seconds, counts in ((0.080, 0.080), (0.040, 0.040), (0.050, 0.040)):
        costs.follow((PASS, 1), seconds)
        assert [costs.plain(1), *passes(costs, 2)] == pytest.approx([counts, 1.1 * counts])


def test_a_pass_of_one_row_takes_no_longer_than_one_of_more():
    """Or a slow first one would let drafts seem to pay, and never be met again."""
    costs = Costs()
    costs.follow((PASS, 1), 0.014)
    costs.follow((PASS, 2), 0.008)
    assert costs.plain(1) == pytest.approx(0.008)


def test_what_a_draft_takes_besides_the_first_three_rounds_tell():
    """Timed aside it has nothing to catch up on."""
    costs, draft = known(), ("x", Effort(1, 2))
    costs.put(draft, 0.002)
    given = (0.008, 0.002), (0.006, 0.002), (0.007, 0.006), (0.012, 0.006)
    for seconds, counts in given:
        costs.follow(draft, seconds)
        assert costs.seconds[draft] == pytest.approx(counts)


def test_figures_move_from_a_twentieth_on():
    costs = known()
    for _ in range(3):
        costs.follow((PASS, 4), 0.016)
    changes = costs.changes
    for _ in range(5):
        costs.follow((PASS, 4), 0.0165)
    assert (passes(costs, 4), costs.changes) == (pytest.approx([0.016]), changes)
    for _ in range(5):
        costs.follow((PASS, 4), 0.018)
    assert (passes(costs, 4), costs.changes) == (pytest.approx([0.017], rel=0.05), changes + 1)


@pytest.mark.parametrize("slower", [2.0, 0.5])
def test_a_machine_that_gets_slower_does_so_for_shapes_that_do_not_run(slower):
    costs, draft = known(), ("x", Effort(1, 2))
    costs.put(draft, 0.002)
    for seconds in [0.010] * 16 + [slower * 0.010] * 24:
        costs.follow((PASS, 1), seconds)
    assert costs.plain(1) == pytest.approx(slower * 0.010, rel=0.2)
    found = [*passes(costs, 4, 8), costs.seconds[draft]]
    assert found == pytest.approx([costs.plain(1) * n for n in (1.6, 1.9, 0.2)], rel=0.15)


def test_what_is_rarely_met_does_not_wander():
    """Rounds vary by a fifth and some are disturbed: what was met once stays where it was."""
    costs, random = known(), np.random.default_rng(0)
    for n in range(3000):
        rows = 4 if n % 7 == 0 else 1
        seconds = {1: 0.010, 4: 0.016}[rows] * random.uniform(1.0, 1.2)
        costs.follow((PASS, rows), seconds + 0.005 * (random.random() < 0.3))
    assert costs.seconds[PASS, 8] == pytest.approx(0.019 * 1.1, rel=0.15)
    assert 0.016 <= costs.seconds[PASS, 4] <= 0.0235


@pytest.mark.parametrize("rows", [2, 32])
def test_the_first_rounds_of_a_shape_say_nothing_of_others(rows):
    costs = Costs()
    for seconds in (0.012, 0.010, 0.011):
        costs.follow((PASS, 4), seconds)
    costs.put((PASS, 8), 0.016)
    costs.put((PASS, 16), 0.019)
    for seconds in (0.080, 0.081, 0.009, *[0.008] * 20):
        costs.follow((PASS, rows), seconds)
    found = [costs.seconds[PASS, other] for other in (4, 8, 16)]
    assert found == pytest.approx([0.010, 0.016, 0.019], rel=0.06)


def test_more_rows_take_no_less():
    costs = known()
    costs.put((PASS, 6), 0.050)
    assert passes(costs, 4, 6, 8) == pytest.approx([0.016, 0.019, 0.019])


def test_what_was_met_often_is_not_corrected_by_what_was_not():
    """Or drafts seem to lose beside plain rounds that are taken to be as fast as no round was."""
    costs = known()
    costs.follow((PASS, 1), 0.010)
    for _ in range(3):
        costs.follow((PASS, 4), 0.002)
    assert [costs.plain(1), *passes(costs, 4)] == pytest.approx([0.010, 0.002])


def test_more_rows_take_no_more_than_several_passes_of_fewer():
    """What disturbed rounds say of a size has this limit, or it would not be met again."""
    costs = Costs()
    costs.follow((PASS, 1), 0.010)
    for seconds in (0.3, 0.2, 0.1, 0.030):
        costs.follow((PASS, 4), seconds)
    assert costs.seconds[PASS, 4] > 0.090
    assert passes(costs, 1, 4) == pytest.approx([0.010, 0.040])
    for _ in range(16):
        costs.follow((PASS, 4), 0.050)
    assert passes(costs, 4) == pytest.approx([0.050], rel=0.06), "unless many rounds say so"


def test_rounds_that_draft_nothing_are_steady_after_three():
    costs = Costs()
    steady = []
    for _ in range(4):
        steady.append(costs.is_steady(2))
        costs.follow((PASS, 2), 0.01)
    assert steady == [False, False, False, True]


def test_drafts_that_were_not_timed_are_guessed_by_those_that_were():
    costs = known()
    efforts = [Effort(1, 4), Effort(6, 4), Effort(1, 2)]

    def guessed():
        seconds, is_known = costs.of_drafts("x", efforts, level=0.003, a_row=0.1)
        return [*map(pytest.approx, seconds)], is_known

    assert guessed() == ([0.012, 0.018, 0.006], False)
    costs.put(("y", Effort(1, 2)), 0.001)
    assert guessed() == ([0.012, 0.018, 0.006], False)
    costs.put(("x", Effort(1, 2)), 0.002)
    assert guessed() == ([0.003, 0.004, 0.002], True)  # half of it its two levels'
    costs.put(("x", Effort(1, 4)), 0.005)  # 0.0015 a level: further than half
    efforts += [Effort(1, 3), Effort(1, 1)]
    assert guessed() == ([0.005, 0.008, 0.002, 0.0035, 0.001], True)


def test_what_was_timed_is_kept_for_other_processes(tmp_path):
    file = tmp_path / "costs" / "of.json"
    costs = known(file=file)
    costs.put(("poss", Effort(4, 3)), 0.003)
    assert not file.exists()
    costs.keep()
    again = Costs(file)
    assert again.seconds == costs.seconds
    assert again.is_steady(1)


ROWS = [["pass", 1, 0.01]]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[1]", "null", '{"pass": 1}', "\0\1", json.dumps([["pass", 1]]),
        json.dumps([["pass", 1, -0.01]]), json.dumps([["pass", 1, "x"]]),
        json.dumps([*ROWS, ["pass", [1, 2, 3], 0.01]]), '[["pass", 1, NaN]]',
    ],
)  # fmt: skip
def test_files_that_are_no_tables_are_named_and_not_used(tmp_path, caplog, content):
    file = tmp_path / "of.json"
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        costs = Costs(file)
    assert costs.seconds == {}
    assert caplog.text.count(f"{file} is no table of costs and is not used") == 1
    costs.follow((PASS, 1), 0.01)
    costs.keep()
    assert Costs(file).seconds == costs.seconds, "it is replaced"


def test_files_are_of_a_model_a_machine_and_a_kind_of_run(tmp_path, monkeypatch):
    model, other = tiny_model("qwen3"), tiny_model("llama")
    monkeypatch.delenv("SPECATTN_CACHE", raising=False)
    assert file_of(model, 1) is None
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    assert file_of(model, 1) == file_of(model, 1)
    assert len({file_of(model, 1), file_of(model, 2), file_of(other, 1)}) == 3


def test_costs_of_a_longer_text_begin_with_those_of_a_shorter_one():
    longer = Costs(former=known())
    assert longer.seconds == known().seconds
    for _ in range(2):  # and more may be timed from its first rounds on
        assert longer.is_steady(1)
        longer.follow((PASS, 1), 0.011)
    assert alike(8, 1000) == alike(9, 1200) != alike(8, 2000)
