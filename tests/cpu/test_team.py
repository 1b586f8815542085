"""The threads that calls share: several callers at once, a fork, the end of the process."""

import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from specattn import _cpu
from tests import HANGS
from tests.cases import make_problem
from tests.cpu import calls

THREADS = (1, 2, 3, 8)
COUNT = 3
TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def isa():
    """Run once: the threads know nothing of code paths."""


@pytest.fixture(autouse=True)
def threads():
    """Let a test set the number of threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def call_of(seed):
    """Return a call that is worth several threads, and whose bits do not depend on their number."""
    torch.manual_seed(seed)
    problem = make_problem((700 + seed, 300), 8, q_heads=16, kv_heads=4, head_dim=64)
    tree = {n: getattr(problem, n) for n in ("k_tree", "v_tree", "tree_mask", "cache_seqlens")}
    return lambda: calls.verify_attention(problem.q, **problem.cache(), **tree)


def same_bits(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_many_calls_with_changing_numbers_of_threads(threads):
    made = [call_of(seed) for seed in range(3)]
    threads(1)
    expected = [call() for call in made]
    for turn in range(200):
        threads(THREADS[turn * 7 // 3 % 4])
        assert same_bits(made[turn % 3](), expected[turn % 3]), turn


def test_callers_at_once(threads):
    made = [call_of(seed) for seed in range(4)]
    threads(1)
    expected = [call() for call in made]

    def run(turn):
        torch.set_num_threads(THREADS[turn // 4 % 4])  # each caller has its own number
        return same_bits(made[turn % 4](), expected[turn % 4])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(100)))


@pytest.fixture
def openmp():
    """Let OpenMP's threads take the pieces, for the length of a test."""
    if not _cpu.use_openmp(True):
        pytest.skip("this process has no OpenMP that can be found")
    yield
    _cpu.use_openmp(False)


def test_threads_of_openmp_give_the_same_bits(threads, openmp):
    made = [call_of(seed) for seed in range(3)]
    threads(1)
    expected = [call() for call in made]
    for turn in range(40):
        threads(THREADS[turn * 7 // 3 % 4])
        assert same_bits(made[turn % 3](), expected[turn % 3]), turn


def test_callers_at_once_in_openmp(threads, openmp):
    test_callers_at_once(threads)


def _send(call, expected, pipe):
    pipe.send((same_bits(call(), expected), TASKS.exists() and len(list(TASKS.iterdir()))))


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="the system does not fork"
)
def test_the_child_of_a_fork_has_threads_of_its_own(threads):
    threads(COUNT)
    call = call_of(0)
    expected = call()
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        ours, theirs = context.Pipe()
        child = context.Process(target=_send, args=(call, expected, theirs))
        child.start()
        assert ours.poll(HANGS)
        right, tasks = ours.recv()
        assert right
        assert tasks == COUNT or not TASKS.exists()
        assert same_bits(call(), expected)
        child.join(HANGS)
        assert child.exitcode == 0


LAST_CALL = """
import os
import torch  # once for both: importing it takes longest
from specattn import _cpu
memory = torch.ones(1 << 16)
for threads in (2, 8):
    if os.fork() == 0:
        for _ in range(100):
            _cpu.read(memory.data_ptr(), memory.nbytes, threads)
        break
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, threads
"""


def test_a_process_ends_right_after_a_call():
    subprocess.run([sys.executable, "-c", LAST_CALL], check=True, timeout=HANGS)
