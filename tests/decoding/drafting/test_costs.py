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
@pytest.mark.parametrize("handed_on", [False, True])
def test_no_two_rounds_decide_and_three_do(outlier, handed_on):
    costs = known()
    for seconds in (0.016, 0.017, 0.016, 0.018, 0.017):
        costs.follow((PASS, 4), seconds)
    if handed_on:  # to longer texts
        costs = Costs(former=costs)
    for seconds in (outlier, 0.017, outlier):
        costs.follow((PASS, 4), seconds)
        assert 0.016 <= costs.seconds[PASS, 4] <= 0.018
    for seconds in (0.030, 0.031, 0.032):
        costs.follow((PASS, 4), seconds)
    assert costs.seconds[PASS, 4] == pytest.approx(0.031, rel=0.05)


def test_a_slow_first_round_counts_for_nothing_and_the_fastest_of_two_does():
    """So that it is met once more, as it would be by what was guessed."""
    costs = known()
    guess = passes(costs, 16)[0]
    for seconds, counts in ((0.5, guess), (0.035, 0.035), (0.030, 0.030), (0.020, 0.030)):
        costs.follow((PASS, 16), seconds)
        assert passes(costs, 16) == pytest.approx([counts])


def test_what_was_guessed_by_a_slow_round_moves_with_it():
    costs = Costs()
    costs.follow((PASS, 1), 0.080)
    before = passes(costs, 2)
    costs.follow((PASS, 2), 0.5)
    assert passes(costs, 2) == pytest.approx(before)
    costs.follow((PASS, 1), 0.040)
    assert passes(costs, 2) == pytest.approx([before[0] / 2])


def test_a_pass_of_one_row_takes_no_longer_than_one_of_more():
    """Or a slow first one would let drafts seem to pay, and never be met again."""
    costs = Costs()
    costs.follow((PASS, 1), 0.014)
    costs.follow((PASS, 2), 0.008)
    assert costs.plain(1) == 0.008
    costs.follow((PASS, 1), 0.006)
    assert costs.plain(1) == 0.006


def test_what_a_draft_takes_besides_the_first_three_rounds_tell():
    """Timed aside it has nothing to catch up on; the fastest of them stands for it from then on."""
    costs, draft = known(), ("x", Effort(1, 2))
    costs.put(draft, 0.002)
    given = (0.008, 0.008), (0.006, 0.006), (0.007, 0.006), (0.012, 0.006)
    for seconds, counts in given:
        costs.follow(draft, seconds)
        assert costs.seconds[draft] == counts


def test_figures_move_from_a_twentieth_on():
    costs = known()
    for _ in range(3):
        costs.follow((PASS, 4), 0.016)
    changes = costs.changes
    for _ in range(5):
        costs.follow((PASS, 4), 0.0165)
    assert (costs.seconds[PASS, 4], costs.changes) == (0.016, changes)
    for _ in range(20):
        costs.follow((PASS, 4), 0.030)
    assert costs.changes == changes + 1


@pytest.mark.parametrize("slower", [2.0, 0.5])
def test_a_machine_that_gets_slower_does_so_for_shapes_that_do_not_run(slower):
    costs, draft = known(), ("x", Effort(1, 2))
    costs.put(draft, 0.002)
    for seconds in [0.010] * 16 + [slower * 0.010] * 9:
        costs.follow((PASS, 1), seconds)
    assert passes(costs, 1, 4, 8) == pytest.approx([slower * s for s in (0.010, 0.016, 0.019)])
    assert costs.seconds[draft] == pytest.approx(slower * 0.002)
    for _ in range(5):
        costs.follow((PASS, 4), slower * 0.016)
    assert costs.seconds[PASS, 8] == pytest.approx(slower * 0.019)


def test_what_is_rarely_met_does_not_wander():
    """Rounds vary by a fifth and some are disturbed: what was met once stays where it was."""
    costs, random = known(), np.random.default_rng(0)
    for n in range(3000):
        rows = 4 if n % 7 == 0 else 1
        seconds = {1: 0.010, 4: 0.016}[rows] * random.uniform(1.0, 1.2)
        costs.follow((PASS, rows), seconds + 0.005 * (random.random() < 0.3))
    assert costs.seconds[PASS, 8] == pytest.approx(0.019 * 1.1, rel=0.15)
    assert 0.016 <= costs.seconds[PASS, 4] <= 0.0235


@pytest.mark.parametrize("handed_on", [False, True])
def test_what_was_met_since_does_not_move(handed_on):
    """A prompt of a few tokens, then one of 31k: eight rows are met there before one is."""
    costs = known()
    for _ in range(16):
        costs.follow((PASS, 1), 0.010)
    if handed_on:
        costs = Costs(former=costs)
    for rows, seconds in ((8, 0.057), (1, 0.030)):
        for _ in range(9):
            costs.follow((PASS, rows), seconds)
    assert passes(costs, 1, 4, 8) == pytest.approx([0.030, 0.048, 0.057])


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
    assert found == pytest.approx([0.010, 0.016, 0.019])


def test_more_rows_take_no_less():
    costs = known()
    costs.put((PASS, 6), 0.050)
    assert passes(costs, 4, 6, 8) == pytest.approx([0.016, 0.019, 0.019])


def test_what_was_met_often_is_not_corrected_by_what_was_not():
    """Or drafts seem to lose beside plain rounds that are taken to be as fast as no round was."""
    costs = known()
    costs.follow((PASS, 4), 0.002)
    assert costs.plain(1) == 0.010
    assert passes(costs, 4) == [0.002]


def test_two_disturbed_rounds_of_more_rows_say_no_more_than_rows_of_fewer_do():
    """Or the size would not be met again: 2 rows take no longer than two passes of 1."""
    costs = Costs()
    for _ in range(3):
        costs.follow((PASS, 1), 0.010)
    for seconds, said in ((0.200, 0.011), (0.150, 0.020), (0.090, 0.090)):
        costs.follow((PASS, 2), seconds)
        assert passes(costs, 2) == pytest.approx([said])


def test_two_disturbed_drafts_say_no_more_than_eight_times_what_was_guessed():
    costs, one = known(), Effort(1, 2)
    for seconds, said in ((0.500, 0.048), (0.400, 0.048), (0.300, 0.300)):
        costs.follow(("x", one), seconds)
        taken, _ = costs.of_drafts("x", [one], level=0.003, a_row=0.1)
        assert taken == pytest.approx([said])


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
    assert guessed() == ([0.004, 0.006, 0.002], True)


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
