"""Compiles what the launchers launch, for GPUs that are not here, and reads what it costs.

`python -m tools.ptx.offline ARCH [quick | few | chosen | small | VARIANT]` prints one JSON
object per kernel: of some cases, of the small kernels, or of all sizes of a variant of attention.
It runs in a process of its own because TRITON_INTERPRET, which other tests set, rules out
compiling. Launches are recorded on meta tensors: no memory is needed and nothing runs.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from unittest import mock

import torch
import triton
from specattn.triton_kernels import _configs
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from .offline_calls import TYPES, calls

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass
class Cost:
    """One compiled kernel: registers and spilled bytes per thread, shared memory in bytes.

    ``programs`` is how many of them `_configs` counts on one SM to hold, if it does. ``copies`` are
    the bytes that one thread's asynchronous copies take, each width that occurs, ``in_products``
    how many instructions move spilled values in the loops of a Hopper kernel's products.
    """

    arch: str
    case: str
    kernel: str
    tile: str
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int
    programs: int | None
    copies: list[int]
    units: str
    in_products: int


@contextmanager
def recorded_launches():
    """Yield a list that fills with (kernel, arguments) instead of anything being launched."""
    launches = []

    def record(self, *args, grid, warmup, **kwargs):
        if warmup:
            return
        launches.append((self, dict(zip(self.arg_names, args, strict=False)) | kwargs))

    run, JITFunction.run = JITFunction.run, record
    try:
        yield launches
    finally:
        JITFunction.run = run


@contextmanager
def configs():
    """Yield a list that fills with the configurations that are chosen, of either kernel."""
    used: list = []

    def remembering(choose):
        def remember(*arguments, **options):
            if config := choose(*arguments, **options):
                used.append(config)
            return config

        return remember

    names = "attention_config", "hopper_config"
    chosen = {name: remembering(getattr(_configs, name)) for name in names}
    with mock.patch.multiple(_configs, **chosen):
        yield used


def compile_launch(kernel, arguments, target):
    """Compile a recorded launch with the specialisation that Triton's launcher would choose."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        special = not parameter.do_not_specialize
        is_int = type(value) is int
        if parameter.is_constexpr or value is None or (special and is_int and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        elif hasattr(value, "block_shape"):
            box, element = list(value.block_shape), TYPES[value.base.dtype]
            signature[name] = f"tensordesc<{element}{box},{value.layout!r}>"
        elif is_int:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[name] = "fp32"
        if special and (isinstance(value, torch.Tensor) or (is_int and value % 16 == 0)):
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in arguments.items() if k not in kernel.arg_names}
    source = source_of(kernel)(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options)


def source_of(kernel):
    """Return what a kernel's source is: Triton's or Gluon's."""
    if not kernel.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def spilled_in_products(compiled):
    """Return how many instructions of the innermost loops with `wgmma` move spilled values."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass(compiled))
    code = {int(at, 16): text for at, text in found}
    products = [at for at, text in code.items() if "HGMMA" in text]
    loops = [loop for loop in _loops(code) if any(loop[0] <= at <= loop[1] for at in products)]
    innermost = [
        (first, last)
        for first, last in loops
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
    ]
    spilled = [at for at, text in code.items() if re.search(r"\b(LDL|STL)\b", text)]
    return sum(first <= at <= last for at in spilled for first, last in innermost)


def _loops(code):
    """Yield (first, last) of what repeats in machine code {address: instruction}.

    A jump back closes a loop if nothing gets to it but through where it leads; others lead from
    what was laid behind a loop back into it.
    """
    following = dict(itertools.pairwise(code))
    jumps = {at: re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text) for at, text in code.items()}
    ways = {}
    for at, text in code.items():
        goes_on = text.startswith("@") or not (jumps[at] or re.match(r"EXIT|RET", text))
        ways[at] = [int(jumps[at][1], 16)] if jumps[at] else []
        ways[at] += [following[at]] if goes_on and at in following else []
    for last, jump in jumps.items():
        if not jump or int(jump[1], 16) > last:
            continue
        first, seen, left = int(jump[1], 16), set(), [min(code)]
        while left:
            at = left.pop()
            if at != first and at not in seen:
                seen.add(at)
                left += ways.get(at, ())
        if last not in seen and first < last:
            yield first, last


def sass(compiled):
    """Return the machine code of a kernel for NVIDIA's as text."""
    return _of_binary(compiled, "-sass")


def _of_binary(compiled, option):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(compiled):
    """Read (registers, spilled bytes) per thread and the matrix units used from the binary."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{key}:\s+(\d+)", text)[1])
            for key in ("vgpr_count", "vgpr_spill_count")
        )
        return registers, 4 * spilled, "mfma" if "v_mfma" in text else ""
    usage = _of_binary(compiled, "--dump-resource-usage")
    registers, stack, local = (
        int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")
    )
    units = ("wgmma", "tcgen05.mma", "mma.sync")
    return registers, stack + local, "+".join(u for u in units if u in compiled.asm["ptx"])


def widths_of_copies(ptx):
    """Return the bytes that `cp.async` instructions take, each width once."""
    copies = re.findall(r"cp\.async\.c[ag][\w.:]* \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    return sorted({int(width, 0) for width in copies})


def warps_of(compiled):
    """Return how many warps a block has, those of a warp-specialised kernel's workers too."""
    declared = re.search(r"\.reqntid (\d+)", compiled.asm.get("ptx", ""))
    return int(declared[1]) // 32 if declared else compiled.metadata.num_warps


ATTENDING = "split_kv_kernel", "hopper_kernel"


def _kernels(arch, which):
    """Yield (label, arguments, what is compiled, programs) of what cases launch, each one once."""
    seen = set()
    for label, call in calls(which):
        with _configs.forced(arch=arch), recorded_launches() as launches, configs() as used:
            call()
        for kernel, arguments in launches:
            compiled = compile_launch(kernel, arguments, TARGETS[arch])
            if compiled.hash not in seen:
                seen.add(compiled.hash)
                programs = used[-1].programs if compiled.metadata.name in ATTENDING else None
                yield label, arguments, compiled, programs


def texts(arch, which="chosen"):
    """Yield (label, PTX) of every kernel that the cases launch on an architecture."""
    for label, _, compiled, _ in _kernels(arch, which):
        yield f"{compiled.metadata.name}, {label}", compiled.asm["ptx"]


def costs(arch, which="chosen"):
    """Yield the cost of every kernel that the cases launch on an architecture."""
    for label, arguments, compiled, programs in _kernels(arch, which):
        blocks = [v for k, v in arguments.items() if re.fullmatch("BLOCK_[MRINTV]", k)]
        registers, spilled, units = resources(compiled)
        facts = compiled.metadata
        yield Cost(
            arch=arch,
            case=label,
            kernel=facts.name,
            tile=" x ".join(map(str, blocks)),
            warps=warps_of(compiled),
            stages=facts.num_stages,
            registers=registers,
            spilled=spilled,
            shared=facts.shared,
            programs=programs,
            copies=widths_of_copies(compiled.asm.get("ptx", "")),
            units=units,
            in_products=spilled_in_products(compiled) if facts.name == "hopper_kernel" else 0,
        )


if __name__ == "__main__":
    for cost in costs(*sys.argv[1:]):
        print(json.dumps(asdict(cost)), flush=True)
