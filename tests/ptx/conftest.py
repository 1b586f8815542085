"""A process without TRITON_INTERPRET, in which kernels compile and are emulated."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def compiler_process():
    """Return a function that calls another one in that process: `call(function, *arguments)`."""
    removed = os.environ.pop("TRITON_INTERPRET", None)
    fusion = os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    pool.submit(os.getpid).result()  # it has started with this environment
    if removed is not None:
        os.environ["TRITON_INTERPRET"] = removed
    assert fusion
    yield lambda function, *arguments: pool.submit(function, *arguments).result()
    pool.shutdown()
