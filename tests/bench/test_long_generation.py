"""What the benchmark says of long generation: lengths, variety, and a shaped distribution."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from common.records import row_key  # noqa: E402
from decoding import models  # noqa: E402
from decoding.cases import UNSHAPED, Entry, Group, Shaping, grid  # noqa: E402
from decoding.columns import COLUMNS  # noqa: E402
from decoding.measure import MeasurePlan, measure  # noqa: E402
from decoding.rows import DecodeRow  # noqa: E402
from decoding.runs import Outcome  # noqa: E402
from decoding.sections import Section  # noqa: E402
from decoding.texts import RandomTokens  # noqa: E402
from studies.papers import Scale, suite  # noqa: E402

from specattn.decoding import ContextualPenalty  # noqa: E402

PENALISED = Shaping(penalty=1.3, penalty_window=8, min_p=0.1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return models.random_weights("tiny", 1, torch.float32, torch.device("cpu"))


def measured(model, groups, plan, defaults=None):
    """Return the records of some groups."""
    records = []
    for group in groups:
        rows = measure(
            model, RandomTokens(64), group, plan, None, lambda name: None, defaults or {}
        )
        for row in rows:
            known = {"section": "s", "new_tokens": plan.new_tokens, **group.record(row.entry)}
            records.append(known | row.record())
    return records


def test_a_rows_variety_is_the_mean_over_texts_that_are_long_enough():
    outcome = Outcome([[1, 2, 1, 2, 1], [7] * 10, [1, 2, 3]], 1.0, None, None)
    row = DecodeRow(Entry("plain"), None, [outcome])
    shares = [(2 / 5 + 1 / 10) / 2, (2 / 4 + 1 / 9) / 2, (2 / 3 + 1 / 8) / 2, (1 + 1 / 7) / 2]
    assert row.distinct == pytest.approx(shares)
    assert DecodeRow(Entry("plain"), None, []).distinct is None


def test_a_row_says_how_far_it_was_at_each_length(model):
    plan = MeasurePlan(new_tokens=24, texts=1, repeats=2, lengths=(6, 12, 24))
    entries = [
        Entry("plain"),
        Entry("vegas", {"gamma": 3, "min_tokens": 16, "ratio": 1.0, "switch": False}),
    ]
    plain, vegas = measured(model, grid(entries, [40]), plan)
    assert plain["fault"] is vegas["fault"] is None
    assert [one["new_tokens"] for one in vegas["lengths"]] == [6, 12, 24]
    assert all(one["tau_without_bonus"] == 0 for one in plain["lengths"])
    # The whole prefix is drafted on, so that all is accepted: 1 token, then 4 a round.
    for one, at, done in zip(vegas["lengths"], (3, 4, 7), (9, 13, 24), strict=True):
        assert one["tau_without_bonus"] == pytest.approx((done - at) / at)
    for own, base in zip(vegas["lengths"], plain["lengths"], strict=True):
        assert own["speedup"] == {"plain": base["seconds"] / own["seconds"]}
        assert base["speedup"] == {}
    assert len(plain["distinct"]) == 4

    section = Section("s", "t", [], ("alpha", "x plain", "D1"))
    whole = section.text([plain, vegas]).splitlines()
    assert len(whole) == 4
    by_length = Section("s", "t", [], section.columns, lengths=(0.25, 0.5, 1.0))
    lines = by_length.text([vegas]).splitlines()[2:]
    assert [line.split(", ")[-1].split("  ")[0] for line in lines] == ["6 new", "12 new", "24 new"]
    rates = [f"{one['tau_without_bonus'] / 3:.2f}" for one in vegas["lengths"]]
    assert [line.split()[-3] for line in lines] == rates
    assert by_length.plan(MeasurePlan(new_tokens=24)).lengths == (6, 12, 24)


def test_a_section_can_show_the_minutes_of_another_ones_rows():
    record = {"section": "a", "speedup": {"plain": 2.0}, "seconds": 0.03, "new_tokens": 4000}
    section = Section("b", "t", rows_of="a")
    assert section.rows([record, {**record, "section": "b"}]) == [record]
    assert (COLUMNS["min"](record), COLUMNS["plain, min"](record)) == ("2.00", "4.00")
    assert COLUMNS["min"]({**record, "speedup": {}}) == "-"
    assert COLUMNS["plain, min"]({**record, "speedup": {}}) == "-"


def test_rows_of_another_distribution_are_other_rows(model):
    plan = MeasurePlan(new_tokens=8, texts=1, repeats=1)
    groups = grid([Entry("plain")], [24], [1.0]) + grid(
        [Entry("plain"), Entry("transformers")], [24], [1.0], shaping=PENALISED
    )
    free, penalised, peer = measured(model, groups, plan)
    assert penalised["fault"] is peer["fault"] is None
    assert free["shaping"] == {}
    assert penalised["shaping"] == {"penalty": 1.3, "penalty_window": 8, "min_p": 0.1}
    assert row_key(free) != row_key(penalised)
    assert peer["lengths"] == []


def test_processors_come_in_transformers_order():
    shaped = Shaping(penalty=1.2, top_p=0.9, min_p=0.1, eta=2e-4)
    kinds = [type(one) for one in shaped.processors(0.7)]
    assert kinds == [
        ContextualPenalty,
        TemperatureLogitsWarper,
        TopPLogitsWarper,
        MinPLogitsWarper,
        EtaLogitsWarper,
    ]
    assert [type(one) for one in shaped.processors(0.0)] == [ContextualPenalty]
    assert list(UNSHAPED.processors(1.0)) == []


def test_every_row_of_tokenswifts_tables_can_be_measured(model):
    """Each method with its options once, and each shaping once."""
    defaults = {
        name: {"drafter": models.random_drafter(name, model, "tiny")}
        for name in ("medusa", "tokenswift")
    }
    sections = suite("tokenswift", Scale(16, 64))
    names = ["Table 3", "Table 4", "Figure 3", *(f"Table {n}" for n in (5, 6, 7, 8))]
    assert [section.name for section in sections] == names
    groups = [group for section in sections for group in section.groups]
    entries = {entry.label: entry for group in groups for entry in group.entries}
    by_shaping = {group.shaping: group for group in groups}
    assert len(by_shaping) == 6 + 6 - 2  # of tables 6 and 8, which have two in common
    plan = MeasurePlan(new_tokens=4, texts=1, repeats=1, lengths=(2, 4))
    whole = Group(64, 1, 1.0, tuple(entries.values()), groups[0].shaping)
    singles = [replace(group, entries=group.entries[-1:]) for group in by_shaping.values()]
    records = measured(model, [whole, *singles], plan, defaults)
    assert [record["fault"] for record in records] == [None] * len(records)
    assert all(len(record["lengths"]) == 2 for record in records)
    swift = [record for record in records if record["method"] == "tokenswift"]
    assert all(COLUMNS[name](row) != "-" for row in swift for name in ("alpha", "beta, whole"))
