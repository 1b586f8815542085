"""What the CUDA C++ kernels take of a GPU: registers, spills, shared memory, as NVRTC's ptxas says.

`python -m tools.ptx.cuda_build ARCH` builds all, prints a line for each, and how long NVRTC took.
"""

import itertools
import re
import sys
import time
from dataclasses import dataclass

from specattn.backends.cuda import build, shape
from specattn.call_forms import NotServed

from .cuda_launch import device

TARGETS = ("sm_80", "sm_90a", "sm_100")
ALL = [f"bf16 D {D}" for D in shape.HEAD_DIMS] + [f"fp16 D {D}" for D in shape.HEAD_DIMS]
ALL += ["merge", "select_topk"]
QUICK = [("merge", "sm_100"), ("select_topk", "sm_90a")]
CHOSEN = [*QUICK, ("bf16 D 128", "sm_90a"), ("fp16 D 256", "sm_80")]


@dataclass
class Built:
    """One program: what a thread takes, threads of a block, blocks that an SM is to hold."""

    program: build.Program
    registers: int
    spilled: int
    static_shared: int
    threads: int
    blocks: int
    seconds: float


def programs(name, arch):
    """Yield (program, threads, blocks) of everything of a name."""
    if name == "merge":
        for element in range(3):
            yield build.Program("merge", (("ELEMENT", element),)), 128, 1
    elif name == "select_topk":
        yield build.Program(name, ()), 512, 1
    else:
        dtype, _, D = name.split()
        sizes = itertools.product((16, 32, 64), range(2), range(3))
        for rows, lookup, collect in sizes:
            try:
                block = shape.shape_of(rows, int(D), device(arch))
            except NotServed:
                continue
            defines = {
                "ELEMENT": int(dtype == "fp16"), "HEAD_DIM": int(D), "ROWS": block.rows,
                "STAGES": block.stages, "BLOCKS": block.blocks, "LOOKUP": lookup,
                "COLLECT": collect,
            }  # fmt: skip
            program = build.Program("decode", tuple(defines.items()))
            yield program, 32 * block.warps, block.blocks


def built(name, arch):
    """Build everything of a name; return a `Built` for each."""
    return [_built(*program, arch) for program in programs(name, arch)]


def _built(program, threads, blocks, arch):
    start = time.perf_counter()
    found = resources(program, arch)
    return Built(program, *found, threads, blocks, time.perf_counter() - start)


def resources(program, arch):
    """Build a program; return (registers, spilled bytes) of a thread, bytes of static memory."""
    said = build.compiled(program, arch, "--ptxas-options=-v")[1]
    kinds = ("stack frame", "spill stores", "spill loads")
    spilled = sum(int(re.search(rf"(\d+) bytes {kind}", said)[1]) for kind in kinds)
    shared = re.search(r"(\d+) bytes smem", said)
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    return registers, spilled, int(shared[1]) if shared else 0


if __name__ == "__main__":
    total = 0.0
    for _name in sys.argv[2:] or ALL:
        for _built_one in built(_name, sys.argv[1]):
            total += _built_one.seconds
            print(_built_one, flush=True)
    print(f"{total:.1f} s")
