"""Run the public primitives on the Triton kernels, in tiles so small that few keys make splits."""

import pytest
import torch

import specattn

if specattn.backends()["triton"] != "available":
    pytest.skip("Triton is not available here", allow_module_level=True)

from specattn.triton_kernels import _configs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles_on_poisoned_memory(poisoned_empty):
    """Force the backend; unwritten outputs and partial results are NaN, not yesterday's numbers."""
    with specattn.use_backend("triton"), _configs.forced(block_n=16, split_size=32):
        yield
