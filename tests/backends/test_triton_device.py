"""Triton's kernels and the one in Gluon on a real GPU: every case that the emulator has."""

import pytest
import torch

import specattn

pytest.importorskip("triton")

from tools.ptx.tests import cases, hopper_cases

from . import device_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or specattn.backends()["triton"] != "available",
        reason="needs a GPU that Triton serves",
    ),
]


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_every_case_of_the_emulator(case):
    device_cases.check(case, "cuda", "triton")


def test_layers_of_few_rows():
    device_cases.check_layers("cuda")


def test_rounds():
    device_cases.check_rounds("cuda")


@pytest.mark.parametrize("seed", range(100))
def test_random_calls_of_the_hopper_kernel(seed):
    device_cases.check(hopper_cases.drawn(seed), "cuda", "triton")
