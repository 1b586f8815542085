"""GPUs that are not there, for the host's side of the CUDA kernels.

Inside `timed_cuda` calls on CPU tensors take what they would take the host of a GPU: nothing is
compiled, and CuPy's own launcher hands launches to a libcuda that does nothing. Inside
`recorded_cuda` launches on tensors of `on_gpu` are recorded instead, with their device and stream.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest import mock

import torch

import specattn
from specattn.backends import select
from specattn.backends.cuda import build, launch

H200 = build.Device("sm_90a", 132, 227 << 10, 228 << 10)


@dataclass
class Recorded:
    """One launch."""

    program: str
    grid: tuple
    device: int
    stream: int
    values: bytes


@dataclass
class Driver:
    """Devices, each with a current stream of its own."""

    device: int | None = 0
    launches: list = field(default_factory=list)
    programs: list = field(default_factory=list)

    def stream(self, device):
        """Return a stream that tells its device."""
        return 1000 + (device or 0)


@contextmanager
def timed_cuda():
    """Let calls on CPU tensors take what they would take the host of a GPU."""
    from .stub_driver import native_libcuda

    native_libcuda()
    with _serving(Driver(None)) as (driver, _):
        yield driver


@contextmanager
def recorded_cuda():
    """Yield a `Driver` that serves tensors of `on_gpu` and records their launches."""
    from .stub_driver import empty_on_gpu

    with _serving(Driver()) as (driver, replaced):

        def record(function, x, y, z, threads, _y, _z, shared, stream, pointers, extra):
            ready = next(r for r in driver.ready if r.function == function)
            program, values = ready.plan.program.name, bytes(ready.buffer)
            assert len(values) == len(ready.plan.values)
            driver.launches.append(Recorded(program, (x, y, z), driver.device, stream, values))

        driver.ready = []
        load = launch.Ready._load

        def remember(ready):
            load(ready)
            driver.ready.append(ready)
            ready.function, ready.launcher = len(driver.ready), record

        replaced(launch.Ready, "_load", remember)
        for name in ("empty", "zeros"):
            replaced(torch, name, empty_on_gpu(getattr(torch, name)))
        yield driver


@contextmanager
def _serving(driver):
    backend = replace(select.BACKENDS["cuda"], why_not=lambda device: None, checks_values=True)

    def function(program, index):
        driver.programs.append((program, index))
        return SimpleNamespace(ptr=1)

    @contextmanager
    def guard(index):
        before, driver.device = driver.device, index
        yield
        driver.device = before

    with ExitStack() as stack:

        def replaced(owner, name, value, **options):
            stack.enter_context(mock.patch.object(owner, name, value, **options))

        replaced(build, "device_of", lambda index: H200)
        replaced(build, "function", function)
        replaced(torch._C, "_cuda_getDevice", lambda: driver.device, create=True)
        replaced(torch._C, "_cuda_getCurrentRawStream", driver.stream, create=True)
        replaced(torch.cuda, "device", guard)
        replaced(torch.cuda, "is_current_stream_capturing", lambda: False)
        replaced(launch, "_bind_context", lambda index: None)
        replaced(launch, "COUNTERS", launch.Counters())
        stack.enter_context(mock.patch.dict(select.BACKENDS, cuda=backend))
        select._chosen.cache_clear()
        stack.callback(select._chosen.cache_clear)
        stack.enter_context(specattn.use_backend("cuda"))
        yield driver, replaced
