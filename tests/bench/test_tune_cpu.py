"""What tunes the CPU kernels: a candidate has to win twice, and the row is one that they read."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

_cpu = pytest.importorskip("specattn._cpu")

import tune_cpu  # noqa: E402
from kernels import bar, rotation  # noqa: E402

USUAL = "unknown unknown 0 0 0"


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Memory and calls of a test's size; values of the code path come back."""
    monkeypatch.setattr(bar, "last_level_cache", lambda device: 1 << 20)
    monkeypatch.setattr(bar, "Pool", lambda size: rotation.Pool(1 << 25))
    small = {
        name: replace(value, cases={label: _shrunk(case) for label, case in value.cases.items()})
        for name, value in tune_cpu.VALUES.items()
    }
    monkeypatch.setattr(tune_cpu, "VALUES", small)
    yield
    _cpu.use_isa(_cpu.isa())


def _shrunk(case):
    return replace(case, context=min(case.context, 200), shape=replace(case.shape, hidden=256))


def table():
    """Return the rows that are shipped."""
    return tune_cpu.TABLE.read_text(encoding="utf-8").split('R"(')[1].split(')"')[0]


def tuner(seconds, *, disturbed=False):
    """Return a tuner whose calls take what `seconds(turn, value, candidate)` says."""
    found, turns = tune_cpu.Tuner(0.0, lambda record: None), []
    found.others = SimpleNamespace(cores=lambda: 0.5 if disturbed else None)

    def alternate(name, candidates, call):
        turns.append(name)
        return {one: [seconds(len(turns), name, one)] for one in candidates}

    found.alternate, found.call = alternate, lambda label, case: None
    return found


def test_what_is_faster_twice_is_taken():
    found = tuner(lambda turn, name, one: 1.0 if one == 2048 else 1.1)
    found.tune("key_ahead")
    assert found.values["key_ahead"] == 2048
    assert "key_ahead=2048" in _cpu.tuning()


@pytest.mark.parametrize(
    "seconds",
    [
        lambda turn, name, one: 1.0 if one == 2048 and turn == 1 else 1.1,
        lambda turn, name, one: 1.0 if one == 2048 else 1.005,
    ],
    ids=["once", "by less than a hundredth"],
)
def test_what_is_faster_by_chance_is_not_taken(seconds):
    found, before = tuner(seconds), _cpu.tuning()
    found.tune("key_ahead")
    assert _cpu.tuning() == before


def test_what_others_disturbed_is_not_taken():
    before = _cpu.tuning()
    tuner(lambda turn, name, one: 1.0 if one == 2048 else 1.1, disturbed=True).tune("key_ahead")
    assert _cpu.tuning() == before


def test_what_slows_one_call_down_is_not_taken():
    first = next(iter(tune_cpu.VALUES["tile_ahead"].cases))
    found, before = tuner(lambda turn, name, one: 1.0), _cpu.tuning()
    found.call = lambda label, case: label
    found.alternate = lambda name, candidates, label: {
        one: [1.0 if one == candidates[0] else 1.05 if label == first else 0.5]
        for one in candidates
    }
    found.tune("tile_ahead")
    assert _cpu.tuning() == before


def test_the_row_is_written_in_the_place_of_the_last_one(tmp_path, monkeypatch):
    path = tmp_path / "tuned.h"
    path.write_text(tune_cpu.TABLE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(tune_cpu, "TABLE", path)
    shipped = table()
    values = tune_cpu.values_of(_cpu.tuning_of(USUAL))
    for key_ahead in (2048, 512):
        tune_cpu.write(path, tune_cpu.row(values | {"key_ahead": key_ahead}))
    assert f"{_cpu.machine()}: key_ahead=512\n" in table()
    assert "key_ahead=2048" not in table()
    found = tune_cpu.values_of(_cpu.tuning_of(_cpu.machine(), table()))
    assert found == values | {"key_ahead": 512}
    others = [line for line in shipped.splitlines() if not line.startswith(_cpu.machine())]
    assert set(others) <= set(table().splitlines())


def test_all_values_are_tried_where_they_are_known(tmp_path, capsys):
    path = tmp_path / "tuned.jsonl"
    assert tune_cpu.main(["--budget", "0.0001", "--json", str(path)]) == 0
    run, *found, row = (json.loads(line) for line in path.read_text().splitlines())
    known = {
        name for name, one in tune_cpu.VALUES.items() if _cpu.isa() in (one.isas or _cpu.isas())
    }
    assert {record["value"] for record in found} == known
    assert run["tuned"] == _cpu.machine()
    assert row["row"] in capsys.readouterr().out
    _cpu.tuning_of(_cpu.machine(), row["row"])  # is one
    names = tune_cpu.values_of(_cpu.tuning())
    assert set(tune_cpu.VALUES) == set(names)
