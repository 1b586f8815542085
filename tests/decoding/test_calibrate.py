"""All is timed at once where it is asked for, and runs then draft from the first tokens on."""

import errno
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specattn.decoding import METHODS, calibrate, generate
from specattn.decoding.drafting import calibrating
from specattn.decoding.drafting.costs import PASS, Costs, Ledger
from specattn.decoding.drafting.gains import Effort
from tests.decoding.fuzzing import drafter_of, model_of
from tests.decoding.models import prompts, tiny_model


def test_what_may_be_drafted_is_timed_before_a_text():
    model = model_of("qwen3", 24, 0.7)
    method = METHODS["poss"](drafter_of("poss", "qwen3", 24, 0.7), width=3, depth=3)
    found = calibrate(model, method, length=30, batch=2)
    assert {*found["ms of a poss, width x depth"]} == {"1 x 1", "1 x 3", "3 x 3"}
    rows = sorted(map(int, found["ms of a pass"]))
    assert rows[0] == 2
    assert rows[-1] == 2 * min(method.max_nodes, 60)
    text = prompts([34, 28], vocabulary=24)
    output = generate(model, text, method, max_new_tokens=2, temperature=0)
    later = output.statistics.details
    assert {*found["ms of a pass"]} <= {*later["ms of a pass"]}, "a later run knows them at once"


@pytest.mark.parametrize("captures", [False, True])
def test_rounds_take_as_much_more_than_passes_aside_as_plain_ones(captures, monkeypatch):
    """A plain round took 10 ms; passes aside 8, of 4 rows 9. The first of a kind takes 500 more."""
    took, now, met = {1: 8, 2: 8, 4: 9, "draft": 3}, [0.0], set[object]()

    def spend(of):
        now[0] += took[of] / 1e3 + 0.5 * (of not in met)
        met.add(of)

    monkeypatch.setattr(calibrating, "_verify", lambda pacer, capture, rows, root: spend(rows))
    clock = SimpleNamespace(now=lambda: now[0], wait=lambda _: None, seconds=lambda a, b: b - a)
    share = SimpleNamespace(
        name="x", kind=PASS, capture=None, sizes=[1, 4], efforts=[Effort(1, 3)],
        run=lambda root, effort: spend("draft"),
    )  # fmt: skip
    costs = Costs()
    costs.follow((PASS, 1), 0.010)
    pacer = SimpleNamespace(
        costs=costs, requests=1, most_looked_up=1, shares=[share], captures=captures, met=set(),
        clock=clock, ledger=Ledger(9.0),
        target=SimpleNamespace(
            runner=SimpleNamespace(most_rows=9), forget_draft=lambda: None
        ),
    )  # fmt: skip
    calibrating.calibrate(pacer, torch.zeros(1))
    assert costs.seconds[PASS, 4] == pytest.approx(0.011)
    assert costs.seconds["x", Effort(1, 3)] == pytest.approx(0.003)
    assert pacer.ledger.capture == pytest.approx(0.5)
    assert pacer.met == {(PASS, 4), ("x", Effort(1, 3))} | ({(PASS, 2)} if captures else set())


@pytest.mark.parametrize("name", ["vegas", "streaming", "triforce", "small", "auto"])
def test_drafts_of_layers_with_a_state_are_timed_too(name):
    """Each began where the one before had ended, which is behind its own beginning."""
    model = tiny_model("qwen3_next", vocab_size=24)
    method = METHODS["triforce" if name == "small" else name]()
    if name == "small":
        method = replace(method, draft=drafter_of("small", "qwen3", 24, 0.7), draft_budget=20)
    calibrate(model, method, length=30, batch=2)
    texts = prompts([30, 26], vocabulary=24)
    output = generate(model, texts, method, max_new_tokens=16, temperature=0)
    plain = generate(model, texts, "plain", max_new_tokens=16, temperature=0)
    assert output.new_tokens == plain.new_tokens


@pytest.mark.parametrize("option", ["length", "batch"])
def test_options_out_of_range_are_named(option):
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        calibrate(model_of("qwen3", 24, 0.7), **{option: 0})


@pytest.mark.parametrize("fault", ["no folder", "full disk"])
def test_a_cache_that_cannot_be_written_ends_no_run_and_is_named_once(fault, tmp_path, monkeypatch):
    """Proofs and costs are to be kept there: one line for both."""
    cache, message = tmp_path / "cache", "No space left on device"
    if fault == "no folder":
        tmp_path.joinpath("file").touch()
        cache, message = tmp_path / "file" / "cache", "Not a directory"
    else:
        monkeypatch.setattr(Path, "write_text", full_disk)
    monkeypatch.setenv("SPECATTN_CACHE", str(cache))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = calibrate(tiny_model("qwen3"), "suffix", length=30)
    assert found["ms of a pass"]
    told = [str(one.message) for one in said if "cannot be written" in str(one.message)]
    assert len(told) == 1
    assert str(cache) in told[0]
    assert message in told[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "file"]


def full_disk(path, text, **options):
    path.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
