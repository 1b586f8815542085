"""Compiles csrc/cuda to kernels on a device: NVRTC, a cache on disk, modules of CuPy."""

from __future__ import annotations

import atexit
import functools
import hashlib
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...files import cache_folder, write_atomically

_HERE = Path(__file__).resolve().parent
_PLACES = (_HERE.parents[3] / "csrc" / "cuda", _HERE / "sources")
SOURCES = next((x for x in _PLACES if (x / "decode.cu").is_file()), _PLACES[-1])
"""The folder of the sources: of the checkout, or of the installed package."""


class Program(NamedTuple):
    """A kernel to build: its file, whose name is the kernel's too, and the file's macros."""

    name: str
    defines: tuple[tuple[str, int], ...]


class Device(NamedTuple):
    """What is built for, and what launches depend on; shared memory in bytes."""

    arch: str
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    name: str = ""


@functools.cache
def device_of(index: int | None) -> Device:
    """Return the properties of GPU `index`."""
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}"
    return Device(
        arch + "a" * (properties.major == 9),  # wgmma and setmaxnreg belong to it
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        properties.shared_memory_per_multiprocessor,
        properties.name,
    )


def compiled(program: Program, arch: str, *more: str, ptx: bool = False) -> tuple[bytes, str]:
    """Compile a program for an architecture such as "sm_90a", to a cubin or to PTX.

    Takes more of NVRTC's options, and returns its log too. Raises RuntimeError with that log where
    NVRTC refuses the program.
    """
    from cupy.cuda import nvrtc

    headers = sorted(SOURCES.glob("*.cuh"))
    source = (SOURCES / f"{program.name}.cu").read_text()
    names = [header.name.encode() for header in headers]
    handle = nvrtc.createProgram(
        source, f"{program.name}.cu", [header.read_bytes() for header in headers], names
    )
    try:
        nvrtc.compileProgram(handle, [*_options(program, arch, ptx), *more])
        code = nvrtc.getPTX(handle) if ptx else nvrtc.getCUBIN(handle)
        return code, nvrtc.getProgramLog(handle)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(handle)
        raise RuntimeError(f"NVRTC does not compile {program} for {arch}: {log}") from error
    finally:
        nvrtc.destroyProgram(handle)


def _options(program: Program, arch: str, ptx: bool) -> list[str]:
    kind = arch.replace("sm_", "compute_") if ptx else arch
    defines = [f"-D{name}={value}" for name, value in program.defines]
    return ["--std=c++17", f"--gpu-architecture={kind}", *(["-lineinfo"] if ptx else []), *defines]


def cubin(program: Program, arch: str) -> Path:
    """Return the file of a compiled program, which is made unless it is in the cache."""
    name = f"{program.name}-{arch}-{_digest(program, arch)}.cubin"
    path = cache_folder() / "cuda" / name
    if path.exists():
        return path
    content, _ = compiled(program, arch)
    try:
        return _stored(path, content)
    except OSError as error:
        warnings.warn(f"specattn: {error}; every process compiles its CUDA kernels anew")
        return _stored(_scratch() / name, content)


def _stored(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda partial: partial.write_bytes(content))
    return path


@functools.cache
def _scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="specattn-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def _sources() -> bytes:
    """Return a digest of everything that a program may include, and of what compiles it."""
    from cupy.cuda import nvrtc

    digest = hashlib.sha256(repr(nvrtc.getVersion()).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


def _digest(program: Program, arch: str) -> str:
    return hashlib.sha256(_sources() + repr((program, arch)).encode()).hexdigest()[:32]


@functools.cache
def function(program: Program, index: int) -> Any:
    """Return a program's kernel on device `index`.

    All its launches share it, so it may take as much shared memory as the device has.
    """
    import cupy

    device = device_of(index)
    path = str(cubin(program, device.arch))
    with cupy.cuda.Device(index):  # CuPy loads for the current device, and torch's may be another
        kernel = cupy.RawModule(path=path).get_function(program.name)
        kernel.max_dynamic_shared_size_bytes = device.shared_per_block - kernel.shared_size_bytes
        kernel.preferred_shared_memory_carveout = 100  # percent: several blocks share an SM
    return kernel.kernel
