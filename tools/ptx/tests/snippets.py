"""Small kernels for the emulator's own tests: a body of PTX, numpy arrays as arguments."""

import struct

import numpy as np

from ..machine import Launch, Machine, Options
from ..memory import GlobalMemory
from ..parser import parse

REGISTERS = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def module(body, parameters):
    """Return a module with one kernel that has some registers of every kind."""
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test({", ".join(parameters)})
{{
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<80>;
    .reg .b64 %q<16>;
    {body}
    ret;
}}
"""


def execute(
    body, *arrays, threads=32, grid=1, shared=0, maps=None, undefined=(), counters=(), constants=(),
    early=False, options=None,
):  # fmt: skip
    """Run a body; parameter ``i`` is named ``pi`` and points to ``arrays[i]``.

    Returns (the arrays after the launch, its counts). ``maps`` makes tensor maps of the addresses
    of the arrays; they are the parameters ``m0`` and so on. ``undefined`` and ``counters``
    are numbers of arrays: those that count as never written, and those that must end unchanged;
    ``constants`` are those that no launch writes, ``early`` says how it starts.
    """
    bytes_ = [np.ascontiguousarray(array).view(np.uint8).ravel() for array in arrays]
    memory = GlobalMemory(
        {
            i: (x, np.zeros(len(x), np.uint8) if i in undefined else None)
            for i, x in enumerate(bytes_)
        }
    )
    addresses = [memory.address(i) for i in range(len(arrays))]
    tensor_maps = dict(enumerate(maps(*addresses) if maps else ()))
    names = [f".param .u64 p{i}" for i in range(len(arrays))]
    names += [f".param .align 64 .b8 m{i}[128]" for i in tensor_maps]
    values = [struct.pack("<Q", address) for address in addresses]
    values += [tensor_maps[i].parameter(i) for i in tensor_maps]
    kernel = parse(module(body, names))["test"]
    told = tensor_maps, counters, constants, early
    launch = Launch(kernel, (grid, 1, 1), (threads, 1, 1), values, shared, *told)
    counts = Machine(launch, memory, options or Options()).run()
    return [memory.read(i)[0].view(x.dtype).reshape(x.shape) for i, x in enumerate(arrays)], counts


def pointer(register, parameter, size, index="%tid.x"):
    """Return PTX that puts the address of a thread's element of a parameter into a register."""
    return f"""
    mov.u32 %r79, {index};
    ld.param.u64 {register}, [p{parameter}];
    mad.wide.u32 {register}, %r79, {size}, {register};
    """


def per_thread(instruction, inputs, result):
    """Return ``%d`` [n] after an instruction on ``%a``, ``%b``, ``%c``, one element per thread."""
    inputs = [np.asarray(x) for x in inputs]
    count = len(inputs[0])
    body = ""
    for i, (name, x) in enumerate(zip("abc", inputs, strict=False)):
        size, kind = x.dtype.itemsize, REGISTERS[x.dtype.itemsize]
        body += f".reg .{kind} %{name};\n{pointer('%q0', i, size)}"
        body += f"ld.global.b{8 * size} %{name}, [%q0];\n"
    out = np.zeros(count, result)
    size = out.dtype.itemsize
    body += f".reg .{REGISTERS[size]} %d;\n{instruction}\n"
    body += f"{pointer('%q1', len(inputs), size)}st.global.b{8 * size} [%q1], %d;"
    return execute(body, *inputs, out, threads=count)[0][-1]
