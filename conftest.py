"""Fixtures that every test shares."""

import os

# Threads that wait for torch's next operator would take a core from the other tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Kernels run through Triton's interpreter where there is no GPU; it must be chosen before import.
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import importlib.util
import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import hypothesis
import pytest
from tools.ptx import executed

gc.disable()  # until tests are collected: what is imported meanwhile stays

# For devices that are not there torch keeps every seed, and the stack that asked for it.
if not torch.cuda.is_available():
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None

hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=25, derandomize=True, print_blob=True
)
# Times 7 properties and 4 code paths of the CPU: more than 2000 cases.
hypothesis.settings.register_profile(
    "sanitize", deadline=None, max_examples=75, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("SPECATTN_HYPOTHESIS", "ci"))


def pytest_collection_modifyitems(config, items):
    """Leave out most cases of GPU code that was executed whole as it is."""
    marks = {item: item.get_closest_marker("gpu_code") for item in items}
    wanted = {args: executed.wanted(*args) for args in {m.args for m in marks.values() if m}}
    left = [item for item, mark in marks.items() if mark and not wanted[mark.args]]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_collection_finish():
    """Leave modules and collected tests out of garbage collections: tests ask for dozens."""
    if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton") is not None:
        from tests import interpreter

        interpreter.patch_once()
    gc.collect()
    gc.freeze()
    gc.enable()
    # To loggers that do not propagate pytest adds its handlers one by one, six times a test.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_sessionfinish():
    """Let the interpreter free them when it ends: extensions report what it does not."""
    gc.unfreeze()


def _poisoned(allocate):
    """Wrap an allocator so that floating-point memory starts as NaN and integers as garbage."""

    def allocator(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype in (torch.int32, torch.int64):
            tensor.fill_(-(2**30))
        return tensor

    return allocator


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Fill what `torch.empty` and its relatives return, so that an unwritten output cannot pass."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))


@pytest.fixture(autouse=True, scope="module")
def _kept():
    """Leave out of collections, too, what a module's tests leave: training asks for one a step."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    """Give every test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _threads():
    """Give what comes later as many threads as it had: some commands set them."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def rounding_ties():
    """Return what compares texts over caches of 8 bits; in the end few may have parted."""
    from tests.decoding.rounding_ties import RoundingTies

    ties = RoundingTies()
    yield ties
    ties.check_share()


@pytest.fixture
def fresh_compiler():
    """Let torch.compile know nothing of other tests: it skips a function once that raised."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def compiler_process():
    """Return what calls a function where kernels compile, in a process without TRITON_INTERPRET."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ, TRITON_DEFAULT_FP_FUSION="1"):
        os.environ.pop("TRITON_INTERPRET", None)
        pool.submit(os.getpid).result()  # it has started, with this environment
    yield lambda function, *arguments: pool.submit(function, *arguments).result()
    pool.shutdown()
