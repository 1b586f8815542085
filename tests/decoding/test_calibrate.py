"""All is timed at once where it is asked for, and runs then draft from the first tokens on."""

import errno
import os
import warnings
from pathlib import Path

import pytest

from specattn.decoding import METHODS, calibrate, generate
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
    text = prompts([30, 28], vocabulary=24)
    output = generate(model, text, method, max_new_tokens=12, temperature=0)
    spent = output.statistics.details["seconds of calibrating, all runs"]
    assert spent == pytest.approx(found["seconds of calibrating, all runs"], abs=1e-3)


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
