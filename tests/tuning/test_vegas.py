"""The three steps of Vegas' tuner: what they choose and what they keep."""

import json
from dataclasses import asdict

import pytest

from specattn.tuning import Record, Sweep, Tuner
from specattn.tuning import vegas as tuning
from tests.decoding.models import prompts, tiny_model

SWEEP = Sweep(
    ratios=(0.1, 0.5, 1.0), gammas=(1, 3), large_gamma=4, min_tokens=1, new_tokens=6, repeats=1
)
RUNS = 2 * (3 + 1 + 2 + 1 + 3)  # two batches of: ratios, plain and gammas, plain and ratios
HEADING = {
    "schema": "test/1",
    "model": {"path": "tiny"},
    "prompts": {"context": 40},
    "sweep": asdict(SWEEP),
}


class Formula(Tuner):
    """Measures a machine on which every token of the cache and every step has its price."""

    def _prefilled(self, prompts, candidates):
        return None

    def _run(self, target, candidate, new_tokens, repeat):
        gamma, ratio = candidate
        accepted = min(gamma, 3, round(40 * ratio))  # of the first three, from 7.5% of the cache on
        seconds = 10 * (2 + gamma * (0.3 + ratio))
        return {"new_tokens": 10 + 10 * accepted, "rounds": 10, "accepted": 10 * accepted} | {
            "seconds": seconds
        }


def test_the_steps_of_the_paper(tmp_path):
    """Shares pay up to 7.5%, drafts up to three tokens; less of either is accepted less."""
    sweep = Sweep((0.025, 0.05, 0.075, 0.3), (1, 2, 3, 4, 8), large_gamma=8, min_tokens=1)
    record = Record(tmp_path / "out.json", HEADING, resume=False)
    chosen = Formula(None, prompts([40, 40]), sweep, record).run(lambda step: None)
    assert chosen["stable_ratio"] == 0.075
    assert (chosen["gamma"], chosen["ratio"]) == (3, 0.075)
    assert chosen["method"] == "vegas:gamma=3,ratio=0.075,min_tokens=1"
    assert chosen["accepted_per_round"] == 3
    assert chosen["speedup"] == pytest.approx(4 / (2 + 3 * 0.375) * 2)
    assert json.loads((tmp_path / "out.json").read_text())["chosen"] == chosen


def test_shares_below_the_least_number_of_tokens_are_tried_once():
    sweep = Sweep(ratios=(0.2, 0.01, 0.05, 0.1), min_tokens=50)
    assert sweep.distinct_ratios(10_000) == [0.2, 0.01, 0.05, 0.1]
    assert sweep.distinct_ratios(1000) == [0.2, 0.05, 0.1]
    assert sweep.distinct_ratios(40) == [0.2]


def test_speeds_are_compared_turn_by_turn():
    """A text that is slower for all, and a run that was disturbed, change no speed-up."""
    own = {"step": "gamma", "gamma": 3, "ratio": 0.1, "new_tokens": 8, "rounds": 2, "accepted": 5}
    plain = {**own, **tuning.PLAIN._asdict(), "rounds": 8, "accepted": 0}
    turns = [(0, 0, 2.0, 4.0), (0, 1, 9.0, 4.0), (1, 0, 5.0, 10.0)]
    runs = [
        {**kind, "batch": batch, "repeat": repeat, "seconds": seconds}
        for batch, repeat, *both in turns
        for kind, seconds in zip((own, plain), both, strict=True)
    ]
    assert tuning.result_of(runs, "gamma", tuning.Candidate(3, 0.1)) == (1.6, 2.5, 2.0)
    assert tuning.result_of(runs[::2], "gamma", tuning.Candidate(3, 0.1)).speedup is None


def tuner(path, *, resume=False):
    return Tuner(tiny_model(), prompts([40, 40]), SWEEP, Record(path, HEADING, resume=resume))


def test_it_measures_real_runs(tmp_path):
    steps = []
    one = tuner(tmp_path / "out.json")
    chosen = one.run(steps.append)
    assert len(steps) == len(one.record.measurements) == one.runs == RUNS
    assert chosen["accepted_per_round"] > 0
    whole = [m for m in one.record.measurements if m["ratio"] == 1.0 and m["gamma"]]
    for measured in whole:  # with everything selected, the first round alone accepts nothing
        assert measured["new_tokens"] == 6
        assert measured["rounds"] == 1 + -(-5 // (measured["gamma"] + 1))


def test_what_was_measured_before_the_end_is_kept(tmp_path, monkeypatch):
    path, real, ran = tmp_path / "out.json", Tuner._run, []

    def counted(self, target, candidate, new_tokens, repeat):
        if new_tokens == SWEEP.new_tokens:
            if len(ran) == RUNS // 2:
                raise KeyboardInterrupt
            ran.append(candidate)
            if len(ran) > 1:
                assert len(json.loads(path.read_text())["measurements"]) == len(ran) - 1
        return real(self, target, candidate, new_tokens, repeat)

    monkeypatch.setattr(Tuner, "_run", counted)
    monkeypatch.setattr(tuning, "WARM_UP_TOKENS", 2)
    with pytest.raises(KeyboardInterrupt):
        tuner(path).run(lambda step: None)
    kept = json.loads(path.read_text())
    assert len(kept["measurements"]) == len(ran) == RUNS // 2
    assert kept["chosen"] is None
    with pytest.raises(ValueError, match="exists; go on with it by --resume"):
        tuner(path)
    monkeypatch.setattr(Tuner, "_run", real)
    again = tuner(path, resume=True)
    again.run(lambda step: None)
    finished = json.loads(path.read_text())
    assert finished["measurements"][: len(ran)] == kept["measurements"]
    keys = {tuning._key(one) for one in finished["measurements"]}
    assert len(keys) == len(finished["measurements"]) == RUNS


def test_other_settings_are_not_resumed(tmp_path):
    path = tmp_path / "out.json"
    Record(path, HEADING, resume=False).write()
    with pytest.raises(ValueError, match="measured with another prompts"):
        Record(path, {**HEADING, "prompts": {"context": 41}}, resume=True)
    path.write_text("{}")
    with pytest.raises(ValueError, match="no file of specattn tune"):
        Record(path, HEADING, resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratios": ()}, "ratios must not be empty"),
        ({"ratios": (0.5, 1.5)}, "ratio must be in"),
        ({"gammas": (0,)}, "gamma must be at least 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"stable": 0.0}, "stable must be in"),
    ],
)
def test_settings_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Sweep(**options)
