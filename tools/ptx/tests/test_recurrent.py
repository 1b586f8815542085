"""Kernels of layers with a state, compiled for GPUs that are not here and executed."""

import pytest

pytest.importorskip("triton")

from . import recurrent

WHOLE = pytest.mark.gpu_code("triton")


def cases(names):
    """Return (case, architecture) of all, of which the first always runs."""
    first, *others = [(name, arch) for name in names for arch in ("sm_90", "sm_80")]
    return [first, *(pytest.param(*other, marks=WHOLE) for other in others)]


@pytest.mark.parametrize(("name", "arch"), cases(recurrent.GATED))
def test_gated_delta(compiler_process, name, arch):
    compiler_process(recurrent.check_gated, recurrent.GATED[name], arch)


@pytest.mark.parametrize(("name", "arch"), cases(recurrent.CONVOLUTIONS))
def test_causal_conv(compiler_process, name, arch):
    compiler_process(recurrent.check_convolution, recurrent.CONVOLUTIONS[name], arch)
