"""A driver of GPUs that are not there, so that what the host does can be tested and timed.

Inside `stubbed` the Triton kernels serve tensors that only say that they lie on a GPU (`on_gpu`).
Nothing is compiled and nothing runs: what would be is recorded. Inside `timed` plain CPU tensors
are served, kernels do compile, and Triton's own launcher hands them to a library that stands for
libcuda and does nothing: a call takes the host's share of it. Needs a process in which
TRITON_INTERPRET is not set.
"""

import ctypes
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from specattn.triton_kernels import _configs, _launch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver as runtime
from triton.runtime.jit import JITFunction

import specattn
from specattn.backends import select

MULTIPROCESSORS = 132
# All that the launchers of Triton and CuPy ask libcuda for.
_LIBCUDA = """
int cuCtxGetCurrent(void **context) { *context = context; return 0; }
#define OK(name) int name() { return 0; }
OK(cuCtxGetDevice) OK(cuCtxGetLimit) OK(cuCtxSetCurrent) OK(cuCtxSetLimit) OK(cuDeviceGet)
OK(cuDeviceGetAttribute) OK(cuDevicePrimaryCtxRetain) OK(cuDriverGetVersion)
OK(cuFuncGetAttribute) OK(cuFuncSetAttribute) OK(cuFuncSetCacheConfig) OK(cuGetErrorString)
OK(cuInit) OK(cuLaunchKernel) OK(cuLaunchKernelEx) OK(cuModuleGetFunction) OK(cuModuleLoadData)
OK(cuModuleUnload) OK(cuOccupancyMaxActiveClusters) OK(cuPointerGetAttribute)
OK(cuStreamIsCapturing) OK(cuTensorMapEncodeIm2col) OK(cuTensorMapEncodeTiled)
"""


@dataclass
class Recorded:
    """One launch. Tensors among the ``arguments`` of the kernel are their addresses."""

    kernel: str
    grid: tuple
    device: int
    stream: int
    arguments: tuple


@dataclass
class StubDriver:
    """Stands for `triton.runtime.driver.active`: H200s, each with a current stream of its own."""

    device: int | None = 0
    launches: list = field(default_factory=list)
    variants: list = field(default_factory=list)  # (kernel, signature, constants, attributes)
    utils: object = field(default_factory=SimpleNamespace)
    launcher_cls: type = nvidia.CudaLauncher

    def __post_init__(self):
        properties = {"max_shared_mem": 232448}
        self.utils.get_device_properties = lambda device: properties
        self.utils.load_binary = lambda *binary: (1, 1, 32, 0, 1024)

    def compile(self, source, target, options, _env_vars=None):
        """Take a specialisation instead of compiling it; return what records its launches."""
        name = source.fn.__name__
        facts = (source.signature, source.constants, source.attrs, options["num_warps"])
        self.variants.append((name, *map(str, facts)))

        def record(x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
            plain = tuple(x for a in arguments for x in _plain(a))
            self.launches.append(Recorded(name, (x, y, z), self.device, stream, plain))

        nothing = {"function": 1, "packed_metadata": (), "launch_metadata": lambda *given: None}
        return SimpleNamespace(run=record, **nothing)

    def get_current_device(self):
        """Return the current device's index."""
        return self.device

    def set_current_device(self, device):
        """Make a device the current one."""
        self.device = device

    def get_current_stream(self, device):
        """Return a stream that tells its device."""
        return 1000 + (device or 0)

    def get_current_target(self):
        """Return what to compile for."""
        return GPUTarget("cuda", 90, 32)


def _plain(argument):
    """Return an argument as numbers: a tensor is its address, a descriptor that and its form."""
    if hasattr(argument, "block_shape"):
        form = (argument.shape, argument.strides, argument.block_shape)
        return argument.base.data_ptr(), str(form)
    return (argument.data_ptr() if isinstance(argument, torch.Tensor) else argument,)


class OnGPU(torch.Tensor):
    """A CPU tensor that says that its memory is a GPU's."""

    @property
    def device(self):
        """The device that `on_gpu` was told."""
        return torch.device("cuda", _places.get(self.untyped_storage().data_ptr(), 0))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        """Let results lie where the first tensor does."""
        result = super().__torch_function__(function, types, args, kwargs)
        if isinstance(result, OnGPU):
            first = next((x for x in args if isinstance(x, OnGPU)), result)
            on_gpu(result, first.device.index)
        return result


_places: dict[int, int] = {}


def on_gpu(tensor, index=0):
    """Return a tensor over the same memory that says that it lies on GPU ``index``."""
    _places[tensor.untyped_storage().data_ptr()] = index
    return tensor.as_subclass(OnGPU)


def empty_on_gpu(allocate):
    """Return `torch.empty`, or a relative, for memory of those GPUs."""

    def empty(*size, device=None, **options):
        tensor = allocate(*size, **options)
        device = torch.device("cuda" if device is None else device)
        return on_gpu(tensor, device.index or 0) if device.type == "cuda" else tensor

    return empty


@contextmanager
def stubbed():
    """Yield a `StubDriver` that serves tensors of `on_gpu`."""
    stub = StubDriver()
    with _serving(stub) as replaced:
        replaced(triton.compiler, "compile", stub.compile)
        replaced(torch, "empty", empty_on_gpu(torch.empty))
        yield stub


@contextmanager
def timed():
    """Let calls on CPU tensors take what they would take the host of a GPU."""
    stub = StubDriver(device=None, utils=_native_utilities())
    with _serving(stub) as replaced:
        replaced(_launch, "_GPUS", ("cuda", "cpu"))
        yield stub


@contextmanager
def _serving(stub):
    kernels = [x for x in _jit_functions() if isinstance(x, JITFunction)]
    backend = replace(select.BACKENDS["triton"], why_not=lambda device: None, checks_values=True)
    with ExitStack() as stack:

        def replaced(owner, name, value):
            stack.enter_context(mock.patch.object(owner, name, value))

        replaced(runtime, "_active", stub)
        replaced(_configs, "_architecture", lambda device: "sm_90")
        replaced(_configs, "multiprocessors", lambda device: MULTIPROCESSORS)
        replaced(_configs, "_hopper_has_passed", lambda: True)
        stack.enter_context(mock.patch.dict(select.BACKENDS, triton=backend))
        stack.enter_context(specattn.use_backend("triton"))
        _forget(kernels)
        stack.callback(_forget, kernels)
        yield replaced


def _forget(kernels):
    """Forget what was compiled and planned."""
    select._chosen.cache_clear()
    for kernel in kernels:
        kernel.device_caches.clear()


def _jit_functions():
    import gc

    return gc.get_objects()


def _native_utilities():
    """Return Triton's own utilities, linked with a libcuda of which every function succeeds."""
    knobs.nvidia.libcuda_path = str(native_libcuda())
    nvidia.library_dirs.cache_clear()
    nvidia.libcuda_dirs.cache_clear()
    return nvidia.CudaUtils()


def native_libcuda():
    """Load a libcuda of which every function succeeds; return its folder."""
    folder = Path(tempfile.mkdtemp(prefix="stub-libcuda-"))
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(_LIBCUDA)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, str(library), str(source)], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return folder
