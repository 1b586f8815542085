"""What a report of a fault needs to know of a machine: `specattn env` and `gpu-check` print it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = (
    "transformers", "tokenizers", "triton", "cupy-cuda12x", "cupy-cuda13x", "flashinfer-python",
    "flash-attn", "fa3-fwd", "flash-attn-4", "vllm",
)  # fmt: skip


def facts() -> Iterator[tuple[str, str]]:
    """Yield names and states: versions, processor, GPUs, and which backends serve here."""
    from importlib import metadata

    import torch

    import specattn

    yield "specattn", specattn.__version__
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    built = torch.version.cuda or torch.version.hip
    built = f"built for {built}" if built else "built without CUDA"
    yield "torch", f"{torch.__version__}, {built}, {torch.get_num_threads()} threads"
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    yield "processor", _processor()
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield (
            f"GPU {number}",
            f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} "
            f"multiprocessors, {gpu.total_memory / 2**30:.0f} GiB",
        )
    for name, state in specattn.backends().items():
        yield f"backend {name}", state
    for name in sorted(name for name in os.environ if name.startswith("SPECATTN_")):
        yield name, os.environ[name]


def _processor() -> str:
    """Return its name, how many cores are ours, memory, and what our kernels use of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [names[0] if names else platform.machine(), f"{cores} cores"]
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found.append(f"{size / 2**30:.0f} GiB")
    try:
        from specattn._cpu import isa, isas

        found.append(f"instruction set {isa()} of {', '.join(isas())}")
    except ImportError:  # nothing was compiled for this machine
        found.append("no C++ kernels")
    return ", ".join(found)
