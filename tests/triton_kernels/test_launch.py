"""What the host does for a call, on GPUs that are not there: see `stub_driver`."""

import pytest

from . import host_cases


@pytest.mark.parametrize("device", [0, 1])
def test_launches_are_on_the_device_of_the_tensors(compiler_process, device):
    """And in its current stream, planned or not; afterwards the current device is as it was."""
    launches, number, current = compiler_process(host_cases.places, device)
    assert launches == {(device, 1000 + device)}
    assert number == 2 * 10
    assert current == 0


def test_plans_launch_what_the_function_would(compiler_process):
    """Calls that differ in one shape, stride, type, device, alignment or value, interleaved."""
    different, as_written, calls = compiler_process(host_cases.planned_and_plain)
    assert not different
    # Once per call to plan it; the three of unaligned queries always run as they are written.
    assert as_written == calls // 3 + 2
