"""Every primitive at random, compiled for GPUs that are not here and executed (`make fuzz`)."""

import pytest

pytest.importorskip("triton")

from . import at_random
from .test_kernels import ARCHITECTURES


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", at_random.CALLS)
def test_random_calls(compiler_process, name, arch, seed):
    if refused := compiler_process(at_random.check, name, seed, arch):
        pytest.skip(refused)
