"""Kernels that Triton miscompiles: which ones, that none of ours is, and that none would run."""

from unittest import mock

import pytest

pytest.importorskip("triton")

from specattn.triton_kernels import _miscompiled
from tests.triton_kernels.test_compile import CANNOT, COMPILED

from .. import offline
from ..launch import emulated
from .case import Case
from .operations import OPERATIONS
from .test_kernels import ARCHITECTURES, WHOLE

WRONG = """
    mul.wide.u32 %rd36, %r2, 2147483648;
    shl.b64 %rd38, %rd37, 33;
    or.b64 %rd39, %rd36, %rd38;
    mov.b64 {_, %r8}, %rd39;
"""


def test_an_index_is_found_where_a_product_reaches_its_half():
    assert _miscompiled.carried(WRONG) == ["%r8"]
    assert _miscompiled.carried(WRONG.replace("{_, %r8}", "{%r7, %r8}")) == ["%r8"]
    for part, other in (
        ("2147483648", "2147483647"),  # no shift
        ("2147483648", "4096"),  # what stays within its half
        ("%rd36, %rd38", "%rd35, %rd38"),  # another number
        ("{_, %r8}", "{%r8, _}"),  # the lower half
    ):
        assert not _miscompiled.carried(WRONG.replace(part, other))


# A tile as `_configs` would choose it by another Triton.
LARGE = Case("hybrid", head_dim=8, rows=8, kv_heads=1, lengths=(90,), block_m=32, hopper=False)


def launched_and_said(case, arch="sm_90"):
    """Return the launches of a call, and what the backend says of it."""
    with emulated(arch, block_m=case.block_m, hopper=False) as launches:
        try:
            OPERATIONS[case.op][0](case)()
        except RuntimeError as error:
            return launches, str(error)
    return launches, ""


def refused_whatever_is_compiled():
    with mock.patch.object(_miscompiled, "carried", return_value=["%r8"]):
        launches, said = launched_and_said(LARGE)
    return len(launches), said


def test_what_is_miscompiled_is_refused_before_it_runs(compiler_process):
    launches, said = compiler_process(refused_whatever_is_compiled)
    assert not launches
    assert "does not serve a shape that this Triton miscompiles" in said
    assert "split_kv_kernel" in said


def found(arch, which):
    """Return which of the kernels that `offline` compiles have such an index."""
    every = offline.calls

    def calls(which):
        return (call for call in every(which) if call[0] != CANNOT.get(arch))

    with mock.patch.object(offline, "calls", calls):
        return [label for label, ptx in offline.texts(arch, which) if _miscompiled.carried(ptx)]


@WHOLE
@pytest.mark.parametrize("arch", [*ARCHITECTURES, "sm_100"])
def test_no_kernel_that_ships_is_miscompiled(compiler_process, arch):
    assert compiler_process(found, arch, COMPILED[arch]) == []
