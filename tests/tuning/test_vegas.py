"""The three steps of Vegas' tuner: what they choose, what they keep, and the command."""

import json
import sys
from dataclasses import asdict

import pytest

from specattn import cli
from specattn.tuning import Record, Sweep, Tuner
from specattn.tuning import vegas as tuning
from tests.decoding.models import letters, prompts, tiny_model

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
NUMBERS = {"gamma": int, "ratio": float, "batch": int, "repeat": int}
COUNTS = {"new_tokens": int, "rounds": int, "accepted": int, "seconds": float}


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


@pytest.fixture
def specattn(monkeypatch, capfd):
    """Run the command; return exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["specattn", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    tiny_model("qwen3").save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder


def test_the_command(specattn, model, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the quick brown fox jumps over the lazy dog " * 2)
    output, pictures = tmp_path / "out.json", tmp_path / "pictures"
    tune = (
        "tune", "vegas", "--model", model, "--prompts", tmp_path / "a.txt", "--prompts",
        tmp_path / "b.txt", "--output", output, "--context", 60, "--ratios", "0.1,0.5",
        "--gammas", "1,2", "--large-gamma", 3, "--min-tokens", 1, "--new-tokens", 5,
        "--repeats", 1, "--batch", 2,
    )  # fmt: skip
    code, _, said = specattn(*tune, "--pictures", pictures)
    assert code == 0, said
    assert "times plain decoding" in said
    for name in ("figure-8.png", "figure-13.png"):
        assert (pictures / name).read_bytes().startswith(b"\x89PNG")
    content = json.loads(output.read_text())
    assert content["schema"] == "specattn.tune.vegas/1"
    assert content["prompts"]["context"] == 60
    assert content["sweep"]["ratios"] == [0.1, 0.5]
    assert len(content["measurements"]) == 2 + 3 + 3
    for one in content["measurements"]:
        assert one["step"] in tuning.STEPS
        for name, kind in {**NUMBERS, **COUNTS}.items():
            assert isinstance(one[name], kind), name
    chosen = content["chosen"]
    assert chosen["gamma"] in (1, 2)
    assert chosen["ratio"] in (0.1, 0.5)
    assert chosen["speedup"] == pytest.approx(  # there is one turn
        chosen["tokens_per_second"] / chosen["plain_tokens_per_second"]
    )

    code, _, said = specattn(*tune, "--resume")
    assert code == 0, said
    assert json.loads(output.read_text()) == content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ratios", "a"), "--ratios: expected numbers"),
        (("--gammas", "0"), "gamma must be at least 1"),
        (("--context", "900"), "fewer than 900"),
        (("--batch", "2"), "do not fill batches of 2"),
        (("--model", "nowhere"), "nowhere is not a folder"),
    ],
)
def test_what_a_user_can_mend_is_one_line(specattn, model, tmp_path, options, message):
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox")
    given = ("tune", "vegas", "--prompts", text, "--output", tmp_path / "o.json", "--model", model)
    code, _, said = specattn(*given, *options)
    assert code == 2
    assert message in " ".join(said.split())
    assert not (tmp_path / "o.json").exists()
