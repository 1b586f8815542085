"""The study of `auto`: cells are measured, added to a file, summed up and drawn."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")

from studies import auto  # noqa: E402

CELL = {"kind": "cell", "context": 64, "text": 0, "temperature": 0.0, "auto": "suffix 100%"}


def cell(**speed):
    return {**CELL, "speed": speed}


def test_cells_are_measured_added_and_drawn(tmp_path, capsys):
    file, picture = tmp_path / "cells.jsonl", tmp_path / "auto.png"
    sizes = ["--context", "64", "--texts", "1", "--new-tokens", "8", "--repeats", "1"]
    methods = ["--method", "plain", "--method", "auto", "--method", "suffix"]
    for heats in ("0", "1"):
        options = [*sizes, *methods, "--temperature", heats, "--json", str(file)]
        assert auto.main(options) == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["kind"] for record in records] == ["run", "cell", "run", "cell"]
    assert [r["temperature"] for r in records if r["kind"] == "cell"] == [0.0, 1.0]
    assert all(set(r["speed"]) == {"plain", "auto", "suffix"} for r in records[1::2])
    assert auto.main(["--draw", str(picture), "--json", str(file)]) == 0
    assert picture.stat().st_size > 1000
    assert "worst of 2 cells" in capsys.readouterr().out


def test_auto_is_held_against_the_best_of_the_others():
    found = auto.ratios(cell(plain=10.0, auto=18.0, suffix=20.0, vegas=12.0))
    assert found == (pytest.approx(1.8), pytest.approx(0.9), "suffix")
    slower = cell(plain=20.0, auto=19.0, suffix=9.0)
    lines = auto.table([cell(plain=10.0, auto=18.0, suffix=20.0), slower])
    assert "worst of 2 cells 0.95" in lines
    assert "worst 0.90" in lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "suffix"], "plain and auto must be among them"),
        (["--method", "magic"], "magic"),
        (["--draw", "x.png"], "--draw needs --json"),
    ],
)
def test_bad_options_are_refused(capsys, options, message):
    with pytest.raises(SystemExit):
        auto.main(options)
    assert message in capsys.readouterr().err
