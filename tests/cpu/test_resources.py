"""What a call takes from the process: no memory that grows with the cache, and no lock."""

import re
import sys
import threading
from pathlib import Path

import pytest
import torch

from .calls import run

PEAK, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
MEBIBYTE = 1 << 20


def peak_growth(call):
    """Return by how many bytes the peak of resident memory during `call` exceeds what is held."""

    def bytes_of(field):
        return 1024 * int(re.search(rf"{field}:\s+(\d+)", STATUS.read_text())[1])

    before = bytes_of("VmRSS")
    PEAK.write_text("5")
    call()
    return bytes_of("VmHWM") - before


def calls_on(length):
    """Return calls of every kernel that reads a cache, with all outputs already written once."""
    q, new = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 1, 8)
    k, v = torch.randn(2, 1, length, 1, 8)
    lengths = torch.tensor([length], dtype=torch.int32)
    out, lse, scores = torch.ones_like(q), torch.ones(1, 2, 4), torch.ones(1, 1, length)
    logits = torch.ones(1, 2, 4, length, dtype=torch.bfloat16)
    indices, counts = torch.ones(1, 1, length, dtype=torch.int32), lengths[None].clone()
    every = torch.arange(length, dtype=torch.int32)[None]
    hybrid = (q, k, v, lengths, new, new, *(None,) * 4, 0.3, 0.0, *(None,) * 5)
    gather = (q, k, v, every, lengths, new, new, None, None, 0.3, 0.0, *(None,) * 6, False)
    chosen = (None, length // 2, 0, 4, 4)
    return {
        "hybrid": lambda: run("hybrid_tree_attention", *hybrid, out, lse),
        "scores": lambda: run(
            "verify_attention", *hybrid, "scores", (0, 1), True, out, lse, scores
        ),
        "logits": lambda: run(
            "verify_attention", *hybrid, "logits", (0, 1), True, out, lse, logits
        ),
        "gather": lambda: run("sparse_gather_attention", *gather, out, lse),
        "importance": lambda: run(
            "importance_scores", q, k, lengths, True, None, 0.3, None, scores
        ),
        "selection": lambda: run("select_topk", scores, lengths, *chosen, indices, counts),
    }


@pytest.mark.skipif(not PEAK.exists(), reason="the peak of memory is known on Linux")
def test_memory_does_not_grow_with_the_cache(isa):
    length = MEBIBYTE  # four bytes for each token would be four mebibytes
    for call in calls_on(1 << 16).values():
        call()  # what threads, libraries and the workspace take once
    for name, call in calls_on(length).items():
        assert peak_growth(call) < MEBIBYTE, name


def returns_before(call):
    """Return whether this thread gets the interpreter's lock before another has made `call`."""
    begins, ended, returned = threading.Event(), threading.Event(), []

    def run():
        begins.set()
        returned.append(call())
        ended.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a thread then keeps the lock until it gives it away
    try:
        thread = threading.Thread(target=run)
        thread.start()
        begins.wait()
        return not ended.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
        assert returned, "the call has raised"


def test_other_threads_run_during_a_call(isa):
    q, (k, v) = torch.randn(1, 32, 8, 64), torch.randn(2, 1, 8192, 2, 64)
    lengths, new = torch.tensor([8192], dtype=torch.int32), torch.randn(1, 32, 2, 64)
    hybrid = (q, k, v, lengths, new, new, *(None,) * 4, 0.1, 0.0, *(None,) * 5)
    state = torch.empty_like(q), torch.empty(1, 32, 8)
    # A machine that is busy elsewhere may wake this thread too late to see it.
    assert any(
        returns_before(lambda: run("hybrid_tree_attention", *hybrid, *state)) for _ in range(10)
    )
    assert not returns_before(lambda: sorted(range(100_000), key=str))  # holds the lock
