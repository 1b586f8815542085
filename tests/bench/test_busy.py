"""The counting process runs when it is told to, and quiet and busy times do not mix."""

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")

from studies import busy  # noqa: E402

STAT = Path("/proc/self/stat")


def ticks(process):
    """Return the processor time of a process in the system's ticks."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.skipif(not STAT.exists(), reason="processor time is known on Linux")
def test_the_counting_process_counts_when_it_is_told_to(monkeypatch):
    started = []
    start = busy.subprocess.Popen

    def popen(*args):
        started.append(start(*args))
        return started[-1]

    monkeypatch.setattr(busy.subprocess, "Popen", popen)
    with busy.counting(0) as switch:
        (process,) = started
        switch(False)
        time.sleep(0.05)  # until the signal has arrived
        before = ticks(process)
        time.sleep(0.2)
        assert ticks(process) == before
        switch(True)
        end = time.monotonic() + 30
        while ticks(process) == before:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert process.returncode is not None


def test_quiet_and_busy_times_are_kept_apart():
    state = [None]
    found = busy.measure(
        {"one": lambda: float(state[0] or 0)}, 3, lambda b: state.__setitem__(0, b)
    )
    assert found == {"one": ([0.0] * 3, [1.0] * 3)}


def test_every_series_is_timed(monkeypatch):
    monkeypatch.setattr(busy, "CALLS", 2)
    before = torch.get_num_threads()
    for name, call in busy.series(before).items():
        assert call() > 0, name
