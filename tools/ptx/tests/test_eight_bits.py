"""Few rows over caches of 8 bits: every code is exact, and a key takes few instructions."""

import pytest

pytest.importorskip("triton")

import torch
from specattn.triton_kernels._configs import UNFENCED

from . import eight_bits

WHOLE = pytest.mark.gpu_code("triton")
# Triton 3.9: int8 24.8, e4m3 22.7, e5m2 18.7; 20.4 of bfloat16, 48.3 before. 8 rows fill 32.
MOST = {("int8", 1): 26, ("e4m3", 4): 24, ("e5m2", 4): 20, ("int8", 4): 26, ("int8", 8): 40}


@pytest.mark.skipif(UNFENCED, reason="counted by newer compilers")
@pytest.mark.parametrize(
    ("stored", "rows", "arch"),
    [
        ("int8", 1, "sm_90"),
        *(
            pytest.param(*case, marks=WHOLE)
            for case in (
                ("e4m3", 4, "sm_90"),
                ("e5m2", 4, "sm_90"),
                ("int8", 4, "sm_80"),
                ("int8", 8, "sm_90"),
            )
        ),
    ],
)
def test_a_key_of_few_rows_takes_few_instructions(compiler_process, stored, rows, arch):
    """Codes become numbers in registers: no byte is read by itself, and no bank is asked twice."""
    instructions, conflicts = compiler_process(eight_bits.a_key, stored, rows, arch)
    assert instructions < MOST[stored, rows]
    assert conflicts == 0


@pytest.mark.parametrize(
    ("stored", "dtype", "arch"),
    [
        ("e4m3", torch.bfloat16, "sm_80"),
        *(
            pytest.param(*case, marks=WHOLE)
            for case in (
                ("e4m3", torch.float16, "sm_90"),
                ("e5m2", torch.bfloat16, "sm_90"),
                ("int8", torch.float16, "sm_80"),
            )
        ),
    ],
    ids=str,
)
def test_every_code_is_exact(compiler_process, stored, dtype, arch):
    compiler_process(eight_bits.check_every_code, stored, dtype, arch)
