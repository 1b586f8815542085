"""`select_topk`, compiled for GPUs that are not here and executed."""

import pytest

pytest.importorskip("triton")

from . import selections


@pytest.mark.gpu_code("triton")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_is_the_reference_exactly(compiler_process, arch):
    compiler_process(selections.check, arch, range(8))


@pytest.mark.gpu_code("triton")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_all_layers_are_one_launch(compiler_process, arch):
    compiler_process(selections.check_layers, arch, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("first", range(8, 208, 20))
def test_is_the_reference_exactly_at_random(compiler_process, arch, first):
    compiler_process(selections.check, arch, range(first, first + 20))
