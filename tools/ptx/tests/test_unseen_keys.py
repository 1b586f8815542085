"""What a row does not see adds nothing to it, by GPU kernels executed in the emulator."""

import pytest

pytest.importorskip("triton")

from specattn.triton_kernels._configs import UNFENCED

from . import unseen

WHOLE = pytest.mark.gpu_code("triton")
CUDA = pytest.mark.gpu_code("cuda")
ALL = unseen.CALLS | unseen.TRITON
QUICK = ("before a window", "of many rows")
# One architecture each, in turn.
SPLIT = [
    pytest.param(name, ("sm_90", "sm_80")[i % 2], marks=() if name in QUICK else WHOLE)
    for i, name in enumerate(ALL)
]


@pytest.mark.parametrize(("name", "arch"), SPLIT)
def test_by_triton(compiler_process, name, arch):
    assert "split_kv_kernel" in compiler_process(unseen.check, ALL[name], "split", arch)


@WHOLE
@pytest.mark.parametrize("name", unseen.HOPPER)
def test_on_hopper(compiler_process, name):
    found = compiler_process(unseen.check, unseen.HOPPER[name], "hopper", "sm_90")
    assert "hopper_kernel" in found or UNFENCED and name == "beside scores"


@CUDA
@pytest.mark.parametrize("name", unseen.CALLS)
def test_by_cuda(compiler_process, name):
    pytest.importorskip("cupy")
    arch = ("sm_80", "sm_90a")[len(name) % 2]
    assert compiler_process(unseen.check, unseen.CALLS[name], "cuda", arch) == {"decode"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kernels", ["split", "hopper", "cuda"])
def test_random_calls(compiler_process, kernels, seed):
    if kernels == "cuda":
        pytest.importorskip("cupy")
    compiler_process(unseen.check_drawn, seed, kernels, "sm_90a" if kernels == "cuda" else "sm_90")
