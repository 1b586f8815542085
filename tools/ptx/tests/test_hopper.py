"""The Hopper kernel in the emulator: what it serves at random, and what it leaves to the other."""

import pytest

pytest.importorskip("triton")

from . import checks, hopper_cases
from .case import Case


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(compiler_process, seed):
    compiler_process(hopper_cases.check_drawn, seed)


LEFT = [
    Case("ragged logits", rows=16, ragged=(16, 1), lengths=(70, 9), kv_heads=1),
    Case("tree", rows=16, lengths=(9,), kv_heads=1),
    Case("hybrid", rows=16, head_dim=80, lengths=(70,), kv_heads=1),
    Case("hybrid", lengths=(70,), kv_heads=1, spare=2100, multiprocessors=1, hopper=True),
    Case("logits", lengths=(70,), kv_heads=1, hopper=True),
]


@pytest.mark.gpu_code("triton")
@pytest.mark.parametrize("case", LEFT, ids=str)
def test_others_are_left_to_the_split_kernel(compiler_process, case):
    counts = compiler_process(checks.check, case, "sm_90")
    assert {name for name, _ in counts} <= {"split_kv_kernel", "combine_kernel"}


@pytest.mark.gpu_code("triton")
@pytest.mark.parametrize("name", hopper_cases.PLANTED)
def test_a_mistake_in_the_kernel_is_caught_by_a_quick_case(compiler_process, name):
    if hopper_cases.is_left(hopper_cases.PLANTED[name][2]):
        pytest.skip("this Triton leaves the case to the split kernel")
    assert compiler_process(hopper_cases.planted, name) != "nothing"
