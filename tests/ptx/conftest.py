"""A process without TRITON_INTERPRET, in which kernels compile and are emulated."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import pytest


@pytest.fixture(scope="session")
def compiler_process():
    """Return a function that calls another one in that process: `call(function, *arguments)`."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ, TRITON_DEFAULT_FP_FUSION="1"):
        os.environ.pop("TRITON_INTERPRET", None)
        pool.submit(os.getpid).result()  # it has started, with this environment
    yield lambda function, *arguments: pool.submit(function, *arguments).result()
    pool.shutdown()
