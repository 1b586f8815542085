"""Runs the CUDA C++ kernels in the emulator: NVRTC compiles them, and their PTX is executed.

What `launch.py` is for the Triton kernels: inside `emulated_cuda` any public primitive serves CPU
tensors, on copies of which its kernels run. Needs CuPy and NVRTC, and no GPU.
"""

import functools
import struct
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch

import specattn
from specattn.backends import select
from specattn.backends.cuda import attention, build, launch

from .launch import Launched, Tensors
from .machine import Launch, Machine, Options
from .parser import parse

SHARED = {"sm_80": (163 << 10, 164 << 10), "sm_90a": (227 << 10, 228 << 10)}
SHARED["sm_100"] = SHARED["sm_90a"]


def device(arch, multiprocessors=132):
    """Return what a launch is told of a GPU."""
    return build.Device(arch, multiprocessors, *SHARED[arch])


@contextmanager
def emulated_cuda(arch, options=None, change=None, split_size=None, multiprocessors=132):
    """Serve CPU tensors by emulated CUDA kernels; yield a list that fills with `Launched`.

    ``change`` maps a parsed kernel to the one to run instead; ``split_size`` [keys] is forced.
    """
    runner = Runner(arch, options or Options(), change)
    cuda = replace(select.BACKENDS["cuda"], why_not=lambda device: None)
    with ExitStack() as stack:
        for owner, name, value in (
            (build, "device_of", lambda index: device(arch, multiprocessors)),
            (launch.Ready, "run", runner.run),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(split_by(split_size))
        stack.enter_context(mock.patch.dict(select.BACKENDS, cuda=cuda))
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            allocate = runner.tensors.allocator(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, allocate))
        select._chosen.cache_clear()
        stack.callback(select._chosen.cache_clear)
        stack.enter_context(specattn.use_backend("cuda"))
        yield runner.launched


def split_by(size):
    """Return a context in which splits have so many keys, unless it is None."""

    def splits(device, shape, heads, span):
        if size is None:
            return plain(device, shape, heads, span)
        slots = max(1, -(-span // size))
        return {"wanted": slots, "least": size, "most": size}, slots

    plain = attention.splits
    return mock.patch.object(attention, "splits", splits)


class Runner:
    """Stands for `launch.Ready.run`."""

    def __init__(self, arch, options, change):
        self.arch, self.options, self.change = arch, options, change
        self.tensors, self.launched = Tensors(), []

    @property
    def run(self):
        """What replaces the method."""
        return lambda ready, args: self._run(ready.plan, args)

    def _run(self, plan, args):
        placed = {place: args[argument] for place, argument in plan.tensors}
        counters = ()
        if plan.workspace:
            place, size = plan.workspace
            placed[place] = torch.empty(size, dtype=torch.uint8)
        if plan.counters:
            place, number = plan.counters
            placed[place] = torch.zeros(number, dtype=torch.int32)
            counters = (self.tensors.key(placed[place]),)
        if plan.apart:
            place, shape, result = plan.apart
            apart = placed[place] = torch.empty(shape)
        for step in range(plan.steps):
            self._step(plan, placed, counters, step)
        if plan.apart:
            torch.mean(apart, 1, out=args[result])

    def _step(self, plan, placed, counters, step):
        memory = self.tensors.memory(placed.values(), all_defined=self.options.all_defined)
        values = bytearray(plan.values)
        if plan.steps > 1:
            struct.pack_into("<i", values, len(values) - 4, step)
        for place, tensor in placed.items():
            address = memory.address(self.tensors.key(tensor))
            address += tensor.storage_offset() * tensor.element_size()
            struct.pack_into("<Q", values, 8 * place, address)
        ptx, kernel = compiled(plan.program, self.arch)
        kernel = self.change(kernel) if self.change else kernel
        threads = (plan.threads, 1, 1)
        started = Launch(kernel, plan.grid, threads, [bytes(values)], plan.shared, {}, counters)
        machine = Machine(started, memory, self.options)
        counts, shape = machine.run(), (plan.grid, plan.threads // 32, plan.shared)
        self.tensors.copy_back(memory)
        ran = Launched(
            plan.program.name, *shape, counts, kernel, ptx, machine.executed, plan.program
        )
        self.launched.append(ran)


@functools.cache
def compiled(program, arch):
    """Return (PTX, parsed kernel) of a program."""
    ptx = build.compiled(program, arch, ptx=True)[0].decode().rstrip("\0")
    return ptx, parse(ptx)[program.name]
