"""The CUDA C++ kernels, compiled by NVRTC and executed in the emulator (`make test-cuda`)."""

import pytest

pytest.importorskip("triton")
pytest.importorskip("cupy")

from .. import cuda_build
from . import cuda_cases, mutate, selections

ARCHITECTURES = cuda_cases.ARCHITECTURES
WHOLE = pytest.mark.gpu_code("cuda")
# Every case on one of the two; on both with the slow tests.
IN_TURN = [
    pytest.param(case, ARCHITECTURES[i % 2], marks=() if case in cuda_cases.QUICK else WHOLE)
    for i, case in enumerate(cuda_cases.SELECTED)
]


@pytest.mark.parametrize(("case", "arch"), IN_TURN, ids=str)
def test_selected(compiler_process, case, arch):
    compiler_process(cuda_cases.check_selected, case, arch)


@WHOLE
@pytest.mark.parametrize("case", cuda_cases.QUICK, ids=str)
def test_tensor_cores_may_cut_sums_off(compiler_process, case):
    compiler_process(cuda_cases.check_cut_off, case, "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", cuda_cases.SELECTED, ids=str)
def test_selected_in_every_order(compiler_process, case, arch):
    compiler_process(cuda_cases.check_orders, case, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(60))
def test_random_calls(compiler_process, seed, arch):
    compiler_process(cuda_cases.check_orders, cuda_cases.drawn(seed), arch)


@WHOLE
def test_states_of_blocks_are_merged_in_any_order(compiler_process):
    """Whoever comes last merges: the bits are the same in two orders of blocks."""
    compiler_process(cuda_cases.check_orders, cuda_cases.MERGED, "sm_80")


@WHOLE
def test_neighbours_and_capacity_do_not_show(compiler_process):
    compiler_process(cuda_cases.check_neighbours, "sm_90a")


@WHOLE
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_select_topk(compiler_process, arch):
    compiler_process(selections.check_cuda, arch, range(3))


# Of 128k scores by one block, with one load under way: what shares are to be held against.
ONE_BLOCK = 705_895


@WHOLE
def test_a_long_row_is_cut_into_shares(compiler_process):
    """All shares of 8 heads run at once: what counts is the longest block of each launch."""
    blocks = compiler_process(selections.longest_blocks, "sm_90a", 131072)
    assert len(blocks) == 4
    assert sum(blocks) <= ONE_BLOCK // 4


@WHOLE
@pytest.mark.parametrize("name", cuda_cases.PLANTED)
def test_a_mistake_in_the_kernel_is_caught_by_a_quick_case(compiler_process, name):
    assert compiler_process(cuda_cases.planted, name) != "nothing"


# What no kernel can do without, and which detectors say so.
NEEDED = {"barrier removed", "copy wait weakened"}


@WHOLE
@pytest.mark.parametrize(
    "name",
    [
        "cuda hybrid",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in mutate.CUDA_TARGETS
            if x != "cuda hybrid"
        ),
    ],
)
def test_removed_synchronisation_is_caught(compiler_process, name):
    caught = compiler_process(mutate.first_caught, name, NEEDED)
    assert caught.keys() == NEEDED
    assert set(caught.values()) <= {"race", "undefined", "bounds"}


@pytest.mark.slow
@pytest.mark.parametrize("name", mutate.CUDA_TARGETS)
def test_nearly_every_barrier_is_needed(compiler_process, name):
    counts = compiler_process(mutate.barriers, name)
    assert counts["caught"] >= counts["harmless"]


@pytest.mark.parametrize(
    ("name", "arch"),
    [pytest.param(*x, marks=() if x in cuda_build.QUICK else WHOLE) for x in cuda_build.CHOSEN],
    ids=str,
)
def test_nothing_is_spilled(compiler_process, name, arch):
    for built in compiler_process(cuda_build.built, name, arch):
        assert built.spilled == 0, built
        assert built.registers * built.threads * built.blocks <= 65536, built


@pytest.mark.slow
@pytest.mark.parametrize("arch", cuda_build.TARGETS)
@pytest.mark.parametrize("name", cuda_build.ALL)
def test_nothing_is_spilled_anywhere(compiler_process, name, arch):
    test_nothing_is_spilled(compiler_process, name, arch)
