"""Launches of the CUDA kernels: planned once per form of a call, on the device of its tensors.

A planner decides everything from the forms of tensors and from plain values: the program, its grid
and its parameters. A call fills in addresses and launches, in torch's current stream. Nothing waits
for the device, and nothing but a workspace is allocated.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ... import gpu_record
from ...call_forms import NotServed, forms_of, picker
from .. import select, triton
from ..backend import written_arguments
from . import build
from .build import Program

_ALIGNMENT = 16  # bytes: of what is copied 16 bytes at a time
_MOST_PLANS = 1024  # per primitive; then all are dropped


class Plan(NamedTuple):
    """One launch; places are those among the addresses at the head of the kernel's parameter."""

    program: Program
    grid: tuple[int, int, int]
    threads: int
    shared: int  # bytes of dynamic shared memory
    values: bytes  # the kernel's parameter, a structure; its addresses come first and are 0 here
    tensors: tuple[tuple[int, int], ...]  # (place, which argument)
    aligned: tuple[int, ...]  # arguments whose memory must begin at a multiple of 16 bytes
    workspace: tuple[int, int] | None = None  # (place, bytes)
    counters: tuple[int, int] | None = None  # (place, 32-bit counters, 0 between launches)
    # (place, shape, which argument) of float32 values per KV head, whose mean over heads, dimension
    # 1, becomes that argument: blocks of different heads run in no order.
    apart: tuple[int, tuple[int, ...], int] | None = None
    slower: str | None = None  # why another kernel is faster
    steps: int = 1  # launches, one behind the other; the last four bytes of `values` tell which


class Trial:
    """Whether a program has run and agreed with another backend, and why it is used no more."""

    passed = False
    retired: str | None = None


_trials: dict[tuple[Program, int], Trial] = {}  # of a program on a device


class Planned:
    """A kernel of the backend: a planner, and the plans that it has made.

    ``planner(*args, device)`` takes an operator's arguments and a `build.Device`, and returns a
    `Plan` or raises `NotServed`. `plain` are the arguments that are no tensors: these and the forms
    of the tensors decide everything.

    Unless the backend is forced, a program's first call on a device is held against another
    backend's, and a program that does not load, run or agree is retired there, with one warning.
    """

    def __init__(self, op: str, planner: Callable[..., Plan], plain: Sequence[int]):
        self.op, self.planner, self.plain = op, planner, picker(plain)
        self.ready: dict[tuple, Ready | str] = {}

    def __call__(self, *args, form: object = None) -> None:
        """Run on an operator's arguments; equal ``form`` promises tensors of equal forms."""
        if form is None:
            form = forms_of(args)
        key = form, self.plain(args)
        ready = self.ready.get(key)
        if ready is None:
            ready = self._prepare(key, args)
        if isinstance(ready, str):
            raise NotServed(ready)
        if select.is_forced("cuda"):
            ready.run(args)
            return
        trial = ready.trial
        if reason := trial.retired or ready.slower:
            raise NotServed(reason)
        if not trial.passed and torch.cuda.is_current_stream_capturing():
            raise NotServed("a program that no call has run before a graph was captured")
        try:
            ready.run(args)
            problem = None if trial.passed else _difference(self.op, args)
        except (NotServed, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever NVRTC, CuPy or the driver of an untested release says
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        trial.passed = problem is None
        if problem:
            trial.retired = f"what its kernel failed at ({problem})"
            warnings.warn(f"specattn: cuda: {self.op}: {problem}; others serve such calls from now")
            raise NotServed(trial.retired)

    def _prepare(self, key: tuple, args: tuple) -> Ready | str:
        if len(self.ready) >= _MOST_PLANS:
            self.ready.clear()
        device = args[0].device
        ready: Ready | str
        try:
            ready = Ready(self.planner(*args, device=build.device_of(device.index)), device)
        except NotServed as reason:
            ready = str(reason)
        self.ready[key] = ready
        return ready


def _difference(op: str, args: tuple) -> str | None:
    """Return how another backend's results differ from those of a call, or None; waits for both."""
    others = {i: torch.empty_like(args[i]) for i in written_arguments(op) if args[i] is not None}
    select.run_beside("cuda", op, *(others.get(i, x) for i, x in enumerate(args)))
    return gpu_record.difference([args[i] for i in others], others.values())


class Ready:
    """A plan on its device."""

    def __init__(self, plan: Plan, device: torch.device):
        self.plan, self.device, self.index = plan, device, device.index
        filled = [place for place, _ in plan.tensors]
        filled += [extra[0] for extra in (plan.workspace, plan.counters, plan.apart) if extra]
        self.addresses = struct.Struct(f"<{max(filled) + 1}Q")
        self.none = [0] * (max(filled) + 1)
        self.aligned = [place for place, argument in plan.tensors if argument in plan.aligned]
        self.lock = threading.Lock()
        self.buffer = ctypes.create_string_buffer(plan.values, len(plan.values))
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.function: int | None = None
        self.launcher: Callable[..., None]
        self.trial = _trials.setdefault((plan.program, device.index), Trial())
        self.slower = None if triton.BACKEND.why_not(None) else plan.slower

    def run(self, args: tuple) -> None:
        """Launch on an operator's arguments."""
        if torch._C._cuda_getDevice() == self.index:
            self._launch(args)
        else:
            with torch.cuda.device(self.index):
                self._launch(args)

    def _launch(self, args: tuple) -> None:
        plan, addresses, together = self.plan, self.none.copy(), 0
        for place, argument in plan.tensors:
            addresses[place] = args[argument].data_ptr()
        for place in self.aligned:
            together |= addresses[place]
        if together % _ALIGNMENT:
            raise NotServed(f"a tensor does not begin at a multiple of {_ALIGNMENT} bytes")
        _bind_context(self.index)
        if self.function is None:
            self._load()
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if plan.workspace:
            place, size = plan.workspace
            workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
            addresses[place] = workspace.data_ptr()
        if plan.counters:
            place, number = plan.counters
            counters = COUNTERS.of(self.device, stream, number)
            addresses[place] = counters.data_ptr()
        if plan.apart:
            place, shape, _ = plan.apart
            apart = torch.empty(shape, dtype=torch.float32, device=self.device)
            addresses[place] = apart.data_ptr()
        with self.lock:  # the launch copies the buffer before it returns
            self.addresses.pack_into(self.buffer, 0, *addresses)
            for step in range(plan.steps):
                if plan.steps > 1:
                    struct.pack_into("<i", self.buffer, len(self.buffer) - 4, step)
                self.launcher(
                    self.function, *plan.grid, plan.threads, 1, 1, plan.shared, stream,
                    ctypes.addressof(self.parameters), 0,
                )  # fmt: skip
        if plan.apart:
            torch.mean(apart, 1, out=args[plan.apart[2]])

    def _load(self) -> None:
        from cupy_backends.cuda.api import driver

        self.kernel = build.function(self.plan.program, self.index)
        self.launcher, self.function = driver.launchKernel, self.kernel.ptr


_thread = threading.local()


def _bind_context(index: int) -> None:
    """Make the device's context current in this thread, which a launch by the driver needs."""
    if not getattr(_thread, "bound", False):
        import cupy

        cupy.cuda.runtime.setDevice(index)  # allowed while a graph is captured, unlike cudaFree(0)
        _thread.bound = True


class Counters:
    """Counters that are 0 between launches: kernels reset them.

    Launches of one stream follow one another, so they share a buffer. A captured launch gets its
    own, since its graph may run beside anything: a slice of an arena that was cleared before
    (`torch.cuda.graph` waits for the device), so that no graph has to. No slice is given back.
    """

    _SIZE = 16384
    _ARENA = 1 << 18  # 1 MiB: some thousand captured calls

    def __init__(self):
        self.buffers: dict[tuple, torch.Tensor] = {}
        self.arenas: dict[int | None, list[torch.Tensor]] = {}  # the last: what is left of one

    def of(self, device: torch.device, stream: int, number: int) -> torch.Tensor:
        """Return at least so many counters for a launch in the current stream, of the device."""
        arenas = self.arenas.setdefault(device.index, [])
        if torch.cuda.is_current_stream_capturing():
            if not arenas or len(arenas[-1]) < number:  # no call was made before: the graph clears
                return torch.zeros(number, dtype=torch.int32, device=device)
            left = arenas[-1]
            arenas[-1] = left[-(-number // 32) * 32 :]
            return left[:number]
        if not arenas or len(arenas[-1]) < self._ARENA // 4:
            arenas.append(torch.zeros(self._ARENA, dtype=torch.int32, device=device))
        key = device.index, stream
        buffer = self.buffers.get(key)
        if buffer is None or len(buffer) < number:
            size = max(number, self._SIZE)
            buffer = self.buffers[key] = torch.zeros(size, dtype=torch.int32, device=device)
        return buffer


COUNTERS = Counters()
