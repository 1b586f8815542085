"""Every test of the C++ kernels runs on every code path that this machine has."""

import pytest

_cpu = pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")

EACH = "each"
at_once = pytest.mark.parametrize("isa", [EACH], indirect=True)


def each(isa):
    """Force one code path after the other where a test has all of them, and yield its name."""
    for one in _cpu.isas() if isa == EACH else [isa]:
        _cpu.use_isa(one)
        yield one


@pytest.fixture(params=_cpu.isas(), autouse=True)
def isa(request):
    """Force one code path for the length of a test.

    `at_once` gives a test all of them, to force by `each`: where a reference takes far longer than
    a kernel, it is computed once.
    """
    before = _cpu.isa()
    if request.param != EACH:
        _cpu.use_isa(request.param)
    yield request.param
    _cpu.use_isa(before)
