"""What the host does for calls of the CUDA kernels, on GPUs that are not there."""

import os
import struct
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch
from tools.ptx import cuda_stub
from tools.ptx.cuda_stub import recorded_cuda
from tools.ptx.stub_driver import on_gpu

import specattn
from specattn.backends import select, triton
from specattn.backends.cuda import attention, build, launch
from tests.triton_kernels import host_cases


def places(device):
    """Return (program, device, stream) of all launches on one GPU, and the current device after."""
    served = ("hybrid_tree_attention", "verify_attention", "sparse_gather_attention")
    served += ("merge_state", "merge_states")
    with recorded_cuda() as driver:
        for function, arguments in host_cases.on_device(device):
            if function.__name__ in served:
                for _ in range(2):
                    function(**arguments)
        return [(x.program, x.device, x.stream) for x in driver.launches], driver.device


def addresses():
    """Call twice with other tensors of the same forms; return what each launch and caller had."""
    given, told = [], []
    with recorded_cuda() as driver:
        for _ in range(2):
            arguments = host_cases.hybrid(N=512)
            specattn.hybrid_tree_attention(**arguments)
            names = {"lengths": "cache_seqlens", "cache_seqlens": "none"}
            given.append(
                {
                    name: getattr(arguments.get(names.get(name, name)), "data_ptr", int)()
                    for name in attention.ADDRESSES
                    if name not in ("partials", "counters")
                }
            )
            values = struct.unpack_from(f"<{len(attention.ADDRESSES)}Q", driver.launches[-1].values)
            told.append(dict(zip(attention.ADDRESSES, values, strict=True)))
        planned = len({id(ready) for ready in driver.ready})
    return given, told, planned


def refusal_of(options):
    """Return the message of a call that the forced backend does not serve."""
    with recorded_cuda():
        try:
            specattn.hybrid_tree_attention(**host_cases.hybrid(N=512, **options))
        except RuntimeError as error:
            return str(error)
    return "served"


def operators_within_a_window(primitive):
    """Return what `host_cases.operators_within_a_window` does."""
    return host_cases.operators_within_a_window(host_cases.FUNCTIONS[primitive], recorded_cuda)


def slower_is_left(rows=12, gpu="", table=None):
    """Return what 5 times so many rows launch: forced, and chosen while Triton is there.

    ``table`` names a folder with a table of who was fastest on a GPU.
    """
    launched = []
    with (
        mock.patch.dict(os.environ, SPECATTN_CACHE=str(table)),
        mock.patch.object(cuda_stub, "H200", cuda_stub.H200._replace(name=gpu)),
        recorded_cuda() as driver,
    ):
        for forced in (True, False):
            driver.launches.clear()
            there = replace(triton.BACKEND, why_not=lambda device: None, find=lambda op: _nothing)
            with (
                mock.patch.object(triton, "BACKEND", there),
                mock.patch.dict(select.BACKENDS, triton=there),
                mock.patch.object(select, "_forced", "cuda" if forced else None),
                mock.patch.object(launch, "_difference", return_value=None),
            ):
                select._chosen.cache_clear()
                specattn.hybrid_tree_attention(**host_cases.hybrid(T=rows, N=256))
            launched.append(driver.launches[-1].program if driver.launches else "no launch")
    return launched


def unforced(kind):
    """Call one program in two forms, twice each, with Triton there; ``kind``: what becomes of it.

    Returns (who served, in turn; the warnings).
    """
    served = []

    def triton_kernel(*args, form=None):
        served.append("triton")
        for result in args[-2:]:
            result.fill_(1)

    def run(ready, args):
        if kind in ("ImportError", "CompileException"):
            raise type(kind, (Exception,), {})("libnvrtc.so is missing")
        served.append("cuda")
        for result in args[-2:]:
            result.fill_(2 if kind == "differs" else 1)
        args[-1].view(-1)[0] = torch.nan if kind == "NaN" else -torch.inf if kind == "empty" else 1

    with (
        recorded_cuda(),
        mock.patch.object(launch.Ready, "run", run),
        mock.patch.object(launch, "_trials", {}),
        mock.patch.object(
            torch.cuda, "is_current_stream_capturing", return_value=kind == "captured"
        ),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        there = replace(triton.BACKEND, why_not=lambda device: None, find=lambda op: triton_kernel)
        with (
            mock.patch.object(triton, "BACKEND", there),
            mock.patch.dict(select.BACKENDS, triton=there),
            mock.patch.object(select, "_forced", None),
        ):
            select._chosen.cache_clear()
            for N in (128, 256):
                for _ in range(2):
                    specattn.hybrid_tree_attention(**host_cases.hybrid(T=1, N=N))
    return served, [str(x.message) for x in caught]


def captured():
    """Return what a captured call launches and clears, behind an eager one, and two's counters."""
    cleared, place = [], 8 * attention.ADDRESSES.index("counters")
    with recorded_cuda() as driver:
        arguments = host_cases.hybrid(N=4096)
        specattn.hybrid_tree_attention(**arguments)
        zeros = torch.zeros
        with (
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
            mock.patch.object(torch, "zeros", lambda *x, **y: cleared.append(x) or zeros(*x, **y)),
        ):
            for _ in range(2):
                specattn.hybrid_tree_attention(**arguments)
        at = [struct.unpack_from("<Q", x.values, place)[0] for x in driver.launches]
    return len(driver.launches), len(cleared), at


def launches_of_a_selection(length):
    """Return (grid, last four bytes, places of workspace and counters) of each launch."""
    scores = on_gpu(torch.zeros(1, 2, length))
    with recorded_cuda() as driver:
        specattn.select_topk(scores, on_gpu(torch.tensor([length], dtype=torch.int32)), budget=9)
        return [
            (x.grid, struct.unpack_from("<i", x.values, len(x.values) - 4)[0],
             struct.unpack_from("<2Q", x.values, 32))
            for x in driver.launches
        ]  # fmt: skip


def of_a_module(index=0):
    """Load a kernel with 2048 static bytes for a GPU while CuPy's current device is 0.

    Returns what dynamic shared memory it is allowed, and on which devices it was loaded and set up.
    """
    current, seen = [0], []

    @contextmanager
    def current_device(number):
        current.append(number)
        yield
        current.pop()

    class Function:
        kernel, shared_size_bytes = SimpleNamespace(ptr=1), 2048

        def __setattr__(self, name, value):
            seen.append(current[-1])
            self.__dict__[name] = value

    def module(path):
        seen.append(current[-1])
        return SimpleNamespace(get_function=lambda name: function)

    function = Function()
    build.function.cache_clear()
    with (
        mock.patch.object(build, "device_of", return_value=cuda_stub.H200),
        mock.patch.object(build, "cubin", return_value="a.cubin"),
        mock.patch("cupy.cuda.Device", current_device),
        mock.patch("cupy.RawModule", module),
    ):
        build.function(build.Program("decode", ()), index)
    build.function.cache_clear()
    return function.max_dynamic_shared_size_bytes, seen


def _nothing(*args, form=None):
    """Stand for a kernel of Triton."""
