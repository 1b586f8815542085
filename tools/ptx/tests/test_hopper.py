"""The Hopper kernel in the emulator: what it serves at random, and what it leaves to the other."""

import pytest
import torch

pytest.importorskip("triton")

from tests.engine_layouts import LAYOUTS, memory, views

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
    Case("hybrid", lengths=(70,), kv_heads=1, spare=33000, multiprocessors=1, hopper=True),
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


def in_pieces(order):
    """Return whether TMA reads the pages of an engine's memory, of which each side is a matrix."""
    from specattn.triton_kernels._hopper import matrix_of

    shape = (9, 64, 2, 128)
    room = memory(order, shape, torch.bfloat16)
    return all(matrix_of(side) is not None for side in views(order, room, shape))


@pytest.mark.parametrize("order", LAYOUTS)
def test_pages_of_engines_are_read_by_tma(compiler_process, order):
    """But padded ones, which do not lie a number of rows apart: these are copied row by row."""
    assert compiler_process(in_pieces, order) == ("|" not in order)
