"""What is newer than our GPUs have seen is held against another kernel at its first call."""

import warnings

import pytest
import torch
from specattn.triton_kernels import _configs, _launch, _trial

from specattn.call_forms import NotServed


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda", 3)


@pytest.fixture
def results(monkeypatch):
    monkeypatch.setattr(_trial, "_agreed", {})
    monkeypatch.setattr(_configs, "_forced", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    out = torch.full((4, 8), 7.0, dtype=torch.bfloat16).as_subclass(OnGpu)
    return out, torch.full((4,), 7.0), None


def writes(value, lse=0.5):
    calls = []

    def run(out, log_sums, collected):
        calls.append(1)
        assert collected is None
        out.fill_(value)
        log_sums.fill_(lse)

    return run, calls


def test_what_agrees_is_asked_once_and_writes_nothing_of_the_call(results):
    (ours, calls), (others, beside) = writes(1.0), writes(1.004)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert _trial.passes(("new", 64), results, ours, others)
    assert (len(calls), len(beside)) == (1, 1)
    assert (results[0] == 7).all()
    assert (results[1] == 7).all()


@pytest.mark.parametrize(
    ("value", "lse", "said"),
    [
        (1.5, 0.5, "32 of 32 elements differ"),
        (float("nan"), 0.5, "32 of 32 elements differ"),
        (1.0, 0.51, "4 of 4 elements differ"),
    ],
)
def test_what_differs_is_retired_with_one_warning(results, value, lse, said):
    (ours, calls), (others, _) = writes(value, lse), writes(1.0)
    with pytest.warns(UserWarning, match=f"new: {said} from another backend's; others serve"):
        assert not _trial.passes(("new", 64), results, ours, others)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _trial.passes(("new", 64), results, ours, others)
    assert len(calls) == 1
    assert _trial.passes(("new", 128), results, others, others), "another kernel is asked anew"


def test_what_does_not_compile_is_retired(results):
    def fails(*given):
        raise RuntimeError("no such layout\nin this release")

    with pytest.warns(UserWarning, match="RuntimeError: no such layout in this release"):
        assert not _trial.passes(("new", 64), results, fails, writes(1.0)[0])


@pytest.mark.parametrize("error", [NotServed, torch.OutOfMemoryError])
def test_what_says_nothing_of_a_kernel_is_passed_on(results, error):
    def fails(*given):
        raise error("for now")

    with pytest.raises(error):
        _trial.passes(("new", 64), results, fails, writes(1.0)[0])
    assert _trial.passes(("new", 64), results, writes(1.0)[0], writes(1.0)[0])


def test_a_capture_runs_what_has_agreed_before_it(results, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not _trial.passes(("new", 64), results, writes(1.0)[0], writes(1.0)[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert _trial.passes(("new", 64), results, writes(1.0)[0], writes(1.0)[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _trial.passes(("new", 64), results, writes(1.0)[0], writes(1.0)[0])


def test_no_trial_becomes_part_of_a_plan(results):
    tape = _launch.Tape()
    _launch._recording.tape = tape
    try:
        with tape:
            assert _trial.passes(("new", 64), results, writes(1.0)[0], writes(1.0)[0])
            assert _launch._recording.tape is tape
    finally:
        _launch._recording.tape = None
    assert tape.plain
    assert not tape.workspaces


def test_nothing_is_found_out_while_kernels_are_compiled_ahead(results, monkeypatch):
    """No launch has a result then; the other kernel is compiled, too, for the trial to come."""
    monkeypatch.setattr(_launch, "compiles", lambda: True)
    (ours, calls), (others, beside) = writes(1.0), writes(2.0)
    assert _trial.passes(("new", 64), results, ours, others)
    assert (len(calls), len(beside)) == (0, 1)
    monkeypatch.setattr(_launch, "compiles", lambda: False)
    with pytest.warns(UserWarning, match="differ"):
        assert not _trial.passes(("new", 64), results, ours, others)
    monkeypatch.setattr(_launch, "compiles", lambda: True)
    assert not _trial.passes(("new", 64), results, ours, others)
