"""Run the public primitives on the Triton kernels, in tiles so small that few keys make splits."""

import hypothesis
import pytest
import torch

import specattn

if specattn.backends()["triton"] != "available":
    pytest.skip("Triton is not available here", allow_module_level=True)

from specattn.triton_kernels import _configs
from tools.ptx import executed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

WHOLE = pytest.mark.gpu_code("triton")


def mostly(first, *others):
    """Return parameters of which the first always counts, the others where kernels changed."""
    return [first, *(pytest.param(other, marks=WHOLE) for other in others)]


def interpreted(count):
    """Return settings for a property that Triton's interpreter runs, some half second to a case.

    Every run of the tests draws the same cases, so two of them are enough while the kernels are
    those on record; `make fuzz` draws ten times as many.
    """
    if hypothesis.settings.get_current_profile_name() == "fuzz":
        return hypothesis.settings(max_examples=10 * count)
    return hypothesis.settings(max_examples=count if executed.wanted("triton") else 2)


@pytest.fixture(autouse=True)
def _small_tiles_on_poisoned_memory(poisoned_empty):
    """Force the backend; unwritten outputs and partial results are NaN, not yesterday's numbers."""
    with specattn.use_backend("triton"), _configs.forced(block_n=16, split_size=32):
        yield
