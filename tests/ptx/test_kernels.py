"""Our kernels, compiled for GPUs that are not here and executed: right, and the same every way."""

import pytest

from . import calls


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("number", range(len(calls.SELECTED)), ids=lambda i: calls.SELECTED[i])
def test_selected(compiler_process, arch, number):
    compiler_process(calls.check, "SELECTED", number, arch)
