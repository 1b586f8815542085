"""Runs the launches of the Triton kernels in the emulator, on the CPU tensors they are given.

Inside `emulated` every launch is compiled for a GPU architecture that is not here, and its PTX is
executed there and then on copies of its tensors, which are copied back. A tensor that
`torch.empty` made is undefined until a kernel writes it, and so is every NaN of an input: the tests
fill with NaN what must not be looked at. Needs a process in which TRITON_INTERPRET is not set.
"""

import functools
import struct
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from specattn.triton_kernels import _configs
from triton.runtime.jit import JITFunction

import specattn
from specattn.backends import select

from .bulk import TensorMap
from .counts import Counts
from .machine import Launch, Machine, Options
from .memory import GlobalMemory, poison
from .offline import TARGETS, compile_launch, warps_of
from .parser import parse


@dataclass
class Launched:
    """One executed launch."""

    name: str
    grid: tuple
    warps: int
    shared_bytes: int
    counts: Counts
    kernel: object
    ptx: str
    executed: list  # how often each instruction was
    compiled: object = None  # Triton's kernel, or the CUDA program


@contextmanager
def emulated(arch, options=None, change=None, counters=(), constants=(), **forced):
    """Serve CPU tensors by emulated Triton kernels; yield a list that fills with `Launched`.

    ``change`` maps a parsed kernel to the one to run instead. ``counters`` are tensors that every
    launch must leave as it finds them, ``constants`` those that it may read before it waits for the
    launches before it. ``forced`` goes to `_configs.forced`.
    """
    runner = Runner(arch, options or Options(), change, counters, constants)
    triton = replace(select.BACKENDS["triton"], why_not=lambda device: None)
    blocks = _configs.combine_blocks
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(select.BACKENDS, triton=triton))
        stack.enter_context(mock.patch.object(JITFunction, "run", runner.hook()))
        on_gpu = lambda device, *rest: blocks(torch.device("cuda"), *rest)  # noqa: E731
        stack.enter_context(mock.patch.object(_configs, "combine_blocks", on_gpu))
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            allocate = runner.tensors.allocator(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, allocate))
        stack.enter_context(_configs.forced(arch=arch, **forced))
        stack.enter_context(specattn.use_backend("triton"))
        yield runner.launched


class Runner:
    """Compiles and executes launches."""

    def __init__(self, arch, options, change, counters, constants):
        self.arch, self.options, self.change, self.counters = arch, options, change, counters
        self.constants = constants
        self.tensors, self.launched = Tensors(), []

    def hook(self):
        """Return what replaces `JITFunction.run`."""

        def run(kernel, *args, grid, warmup, **kwargs):
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            if warmup:
                return compile_cached(kernel, arguments, self.arch)[0]
            self.launch(kernel, arguments, (*grid, 1, 1)[:3])
            return None

        return run

    def launch(self, kernel, arguments, grid):
        """Execute one launch and copy its tensors back."""
        compiled, parsed = compile_cached(kernel, arguments, self.arch)
        memory = self.tensors.memory(arguments.values(), all_defined=self.options.all_defined)
        parsed = self.change(parsed) if self.change else parsed
        values, tensor_maps = [], {}
        for parameter, value in passed(kernel, arguments):
            if hasattr(value, "block_shape"):
                number = len(tensor_maps)
                tensor_maps[number] = self._tensor_map(value, memory)
                values.append(TensorMap.parameter(number))
                values += [struct.pack("<q", x) for x in (*value.shape, *value.strides)]
            else:
                values.append(self._bits(value, memory, parameter.do_not_specialize))
        hidden = len(parsed.parameters) - len(values)  # pointers that Triton's runtime would pass
        threads = (32 * warps_of(compiled), 1, 1)
        counters, constants = (
            {self.tensors.key(tensor) for tensor in tensors} & memory.where.keys()
            for tensors in (self.counters, self.constants)
        )
        launch = Launch(
            parsed, grid, threads, values + [bytes(8)] * hidden, compiled.metadata.shared,
            tensor_maps, tuple(counters), tuple(constants), bool(arguments.get("launch_pdl")),
        )  # fmt: skip
        machine = Machine(launch, memory, self.options)
        counts = machine.run()
        self.tensors.copy_back(memory)
        self.launched.append(
            Launched(
                compiled.metadata.name, grid, warps_of(compiled),
                compiled.metadata.shared, counts, parsed, compiled.asm["ptx"], machine.executed,
                compiled,
            )
        )  # fmt: skip

    def _tensor_map(self, descriptor, memory):
        """Return what libcuda would make of a descriptor for boxes of 128-byte rows."""
        base, size = descriptor.base, descriptor.base.element_size()
        address = memory.address(self.tensors.key(base)) + base.storage_offset() * size
        width = min(descriptor.block_shape[-1], descriptor.layout.swizzle_byte_width // size)
        return TensorMap(
            address,
            size,
            tuple(reversed(descriptor.shape)),
            tuple(size * stride for stride in reversed(descriptor.strides[:-1])),
            (width, *reversed(descriptor.block_shape[:-1])),
            descriptor.layout.swizzle_byte_width,
        )

    def _bits(self, value, memory, anywhere):
        """Return a parameter's bytes; a tensor lies at a multiple of 16 or ``anywhere``."""
        if isinstance(value, torch.Tensor):
            address = memory.address(self.tensors.key(value))
            address += value.storage_offset() * value.element_size()
            if address % 16 and not anywhere:
                raise ValueError("a tensor does not begin at a multiple of 16 bytes")
            return struct.pack("<Q", address)
        return struct.pack("<f", value) if isinstance(value, float) else struct.pack("<q", value)


def passed(kernel, arguments):
    """Return (declared, value) of the compiled kernel's parameters, in order."""
    values = ((parameter, arguments[parameter.name]) for parameter in kernel.params)
    return [
        (parameter, value)
        for parameter, value in values
        if not (
            parameter.is_constexpr
            or value is None
            or (not parameter.do_not_specialize and type(value) is int and value == 1)
        )
    ]


_compiled = {}
_VAST = 1 << 28  # bytes of a storage of which only what its tensor has is copied


def compile_cached(kernel, arguments, arch):
    """Return (compiled, parsed kernel) of a launch; equal specialisations are compiled once."""
    key = arch, kernel, tuple(_speciality(kernel, name, value) for name, value in arguments.items())
    if key not in _compiled:
        compiled = compile_launch(kernel, arguments, TARGETS[arch])
        _compiled[key] = compiled, parse(compiled.asm["ptx"])[compiled.metadata.name]
    return _compiled[key]


def _speciality(kernel, name, value):
    if isinstance(value, torch.Tensor):
        return name, value.dtype
    parameter = next((p for p in kernel.params if p.name == name), None)
    if type(value) is int and parameter is not None and not parameter.is_constexpr:
        plain = parameter.do_not_specialize
        return name, "int" if plain else (value == 1, value % 16 == 0), -(2**31) <= value < 2**31
    return name, type(value) if isinstance(value, float) else str(value)


class Tensors:
    """The tensors of a process as allocations, and which of their bytes have been written."""

    def __init__(self):
        self.fresh = {}  # storages made by torch.empty: key -> (storage, snapshot, defined)

    @staticmethod
    def key(tensor):
        """Return what identifies a tensor's storage."""
        return tensor.untyped_storage().data_ptr()

    def allocator(self, allocate):
        """Wrap `torch.empty` or a relative: what it returns is poison."""

        @functools.wraps(allocate)
        def empty(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.device.type == "cpu" and tensor.numel():
                data = bytes_of(tensor)
                data[:] = poison(len(data))
                storage = tensor.untyped_storage()
                self.fresh[self.key(tensor)] = storage, data.copy(), np.zeros(len(data), np.uint8)
            return tensor

        return empty

    def memory(self, values, *, all_defined=False):
        """Return a memory that holds the storages of all tensors among ``values``."""
        arrays, runs, self.storages = {}, {}, {}
        for tensor in values:
            if not isinstance(tensor, torch.Tensor) or self.key(tensor) in arrays:
                continue
            key, data = self.key(tensor), bytes_of(tensor)
            self.storages[key] = [data]
            if len(data) > _VAST:
                runs[key] = runs_of(tensor)
                self.storages[key] = [data[at : at + length] for at, length in runs[key]]
                data = np.concatenate(self.storages[key])
            arrays[key] = data, None if all_defined else self._defined(key, tensor, data)
        return GlobalMemory(arrays, runs)

    def _defined(self, key, tensor, data):
        if key in self.fresh:
            _, snapshot, defined = self.fresh[key]
            defined[data != snapshot] = 0xFF  # written by PyTorch between launches
            return defined
        if not tensor.is_floating_point():
            return None
        whole = torch.from_numpy(data).view(tensor.dtype)
        return (
            np.where(whole.isnan().numpy(), 0, 0xFF).astype(np.uint8).repeat(tensor.element_size())
        )

    def copy_back(self, memory):
        """Copy the memory into the tensors."""
        for key, pieces in self.storages.items():
            data, defined = memory.read(key)
            ends = np.cumsum([len(piece) for piece in pieces])
            for piece, part in zip(pieces, np.split(data, ends[:-1]), strict=True):
                piece[:] = part
            if key in self.fresh:
                self.fresh[key] = self.fresh[key][0], data.copy(), defined.copy()


def runs_of(tensor):
    """Return ((offset in bytes, length), ...) of what a tensor has of its storage, ascending."""
    size, length, outer = tensor.element_size(), 1, []
    for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == length:
            length *= count
        elif count > 1:
            outer.append((stride, count))
    offsets = np.array([tensor.storage_offset()])
    for stride, count in outer:
        offsets = (offsets + stride * np.arange(count)[:, None]).ravel()
    if size * length % 16 or (size * offsets % 16).any():
        raise ValueError("rows of a vast tensor are no multiples of 16 bytes")
    return tuple((int(at) * size, length * size) for at in np.sort(offsets))


def bytes_of(tensor):
    """Return the bytes of a tensor's whole storage as an array that shares its memory."""
    storage = tensor.untyped_storage()
    # From a typed tensor, since `torch.empty` may be the wrapped one here.
    flat = torch.tensor([], dtype=torch.uint8)
    return flat.set_(storage, 0, (storage.nbytes(),)).numpy()
