"""What a row does not see adds nothing to it, by GPU kernels executed in the emulator.

By Triton's split kernel alone so far. In CUDA C++ the same spilled 28 to 92 bytes a thread in two
kernels, and to Gluon's TMA brings values that nobody has looked at.
"""

import pytest

pytest.importorskip("triton")

from . import unseen

WHOLE = pytest.mark.gpu_code("triton")
ALL = unseen.CALLS | unseen.TRITON
QUICK = ("before a window", "of many rows")
# One architecture each, in turn.
SPLIT = [
    pytest.param(name, ("sm_90", "sm_80")[i % 2], marks=() if name in QUICK else WHOLE)
    for i, name in enumerate(ALL)
]


@pytest.mark.parametrize(("name", "arch"), SPLIT)
def test_by_triton(compiler_process, name, arch):
    assert "split_kv_kernel" in compiler_process(unseen.check, ALL[name], arch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(compiler_process, seed):
    compiler_process(unseen.check_drawn, seed, "sm_90")
