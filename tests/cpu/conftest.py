"""Every test of the C++ kernels runs on every code path that this machine has."""

import pytest

_cpu = pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")


@pytest.fixture(params=_cpu.isas(), autouse=True)
def isa(request):
    """Force one code path for the length of a test."""
    before = _cpu.isa()
    _cpu.use_isa(request.param)
    yield request.param
    _cpu.use_isa(before)
