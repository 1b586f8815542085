"""``specattn tune`` as a user types it: what it writes, and how it refuses."""

import json
import signal

import pytest

from specattn.tuning import Record
from specattn.tuning import vegas as tuning
from tests.decoding.models import letters, tiny_model

FIELDS = {"gamma": int, "ratio": float, "batch": int, "repeat": int}
FIELDS |= {"new_tokens": int, "rounds": int, "accepted": int, "seconds": float}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
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
    assert "times plain decoding" in " ".join(said.split())  # wherever the line is broken
    for name in ("figure-8.png", "figure-13.png"):
        assert (pictures / name).read_bytes().startswith(b"\x89PNG")
    content = json.loads(output.read_text())
    assert content["schema"] == "specattn.tune.vegas/1"
    assert content["prompts"]["context"] == 60
    assert content["sweep"]["ratios"] == [0.1, 0.5]
    assert len(content["measurements"]) == 2 + 3 + 3
    for one in content["measurements"]:
        assert one["step"] in tuning.STEPS
        for name, kind in FIELDS.items():
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
        (("--output", "/dev/null"), "--output: /dev/null is no regular file, and is not replaced"),
        (("--output", "/proc/o.json"), "--output: folder /proc cannot be written to"),
    ],
)
def test_user_errors_are_one_line(refused, model, tmp_path, options, message):
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox")
    given = ("tune", "vegas", "--prompts", text, "--output", tmp_path / "o.json", "--model", model)
    refused(message, *given, *options)
    assert not (tmp_path / "o.json").exists()


def test_an_interrupted_run_keeps_its_measurements(specattn, model, tmp_path, monkeypatch):
    text, output = tmp_path / "a.txt", tmp_path / "o.json"
    text.write_text("the quick brown fox jumps over the lazy dog " * 2)
    add = Record.add

    def interrupted(self, measurement):
        add(self, measurement)
        if len(self.measurements) == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Record, "add", interrupted)
    code, _, said = specattn(
        "tune", "vegas", "--model", model, "--prompts", text, "--output", output, "--gammas", 1,
        "--ratios", "0.5", "--min-tokens", 1, "--new-tokens", 3, "--repeats", 1,
    )  # fmt: skip
    assert code == 143
    assert "2 measurements are kept, go on with --resume" in " ".join(said.split())
    assert len(json.loads(output.read_text())["measurements"]) == 2
