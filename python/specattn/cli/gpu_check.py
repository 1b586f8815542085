"""``specattn gpu-check``: what runs first on a GPU: are the kernels right there, and how fast."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import typer

import specattn
from specattn import gpu_record
from specattn.cli import gpu_times, gpu_workers
from specattn.cli.gpu_cases import CASES, Verdict
from specattn.cli.options import option, takes_options
from specattn.cli.terminal import write_line

PACKAGES = (
    "triton", "cupy-cuda12x", "cupy-cuda13x", "flashinfer-python", "flash-attn", "fa3-fwd",
    "flash-attn-4", "transformers", "vllm",
)  # fmt: skip
_WORKERS = 8  # processes that compile at once


@dataclass(frozen=True, kw_only=True)
class GpuCheckOptions:
    """Which GPU, and how much of it."""

    device: int = option(0, "Number of the GPU.", min=0)
    only: str | None = option(None, "One primitive, by its name.")
    times: bool = option(True, "Measure times, once all is right.", "--times/--no-times")
    budget: int = option(150, "Seconds that the checks may take.", min=1)


@takes_options
def gpu_check(options: GpuCheckOptions) -> None:
    """Hold every kernel against float64 on this GPU, then time attention beside other libraries.

    Exit code 0: all that backends serve is right. The output is a report to paste into an issue.
    From then on kernels in CUDA C++ and Gluon that passed are preferred on such GPUs.
    """
    if options.only and options.only not in {case.op for case in CASES}:
        known = ", ".join(dict.fromkeys(case.op for case in CASES))
        raise ValueError(f"--only: expected one of {known}, got {options.only!r}")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"built for {built}" if built else "built without CUDA"
        raise ValueError(
            f"gpu-check: torch {torch.__version__} ({why}) finds no GPU here; nothing was checked"
        )
    if options.device >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"--device: expected 0 to {count - 1}, got {options.device}")
    for line in machine(options.device):
        write_line(line)
    found = checked(options)
    if not options.only:
        note(found, torch.cuda.get_device_capability(options.device))
    wrong = [verdict for verdict in found if verdict.state not in ("right", "declined")]
    if options.times and not wrong:
        torch.cuda.set_device(options.device)
        served = {v.backend for v in found if v.state == "right"}
        for line in table([*gpu_times.times([x for x in on_gpus(options.device) if x in served])]):
            write_line(line)
        for name, why in gpu_times.absent().items():
            write_line(f"  {name} takes no part: {why}")
    elif options.times:
        write_line("Times are not measured: first all has to be right.")
    if wrong or not found:
        raise typer.Exit(1)


def machine(device: int) -> Iterator[str]:
    """Yield what is installed, and the GPU."""
    python = f"Python {platform.python_version()}, {platform.machine()}"
    yield f"specattn {specattn.__version__}, {python}"
    built = torch.version.cuda or torch.version.hip
    yield f"torch {torch.__version__}, CUDA {built}"
    properties = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    yield (
        f"GPU {device} of {torch.cuda.device_count()}: {properties.name}, capability "
        f"{major}.{minor}, {properties.multi_processor_count} multiprocessors, "
        f"{properties.total_memory / 2**30:.0f} GiB"
    )
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    for name, state in specattn.backends().items():
        yield f"backend {name}: {state}"


def note(found: list[Verdict], capability: tuple[int, int]) -> None:
    """Record the backends of which something is right, and nothing wrong."""
    right = {verdict.backend for verdict in found if verdict.state == "right"}
    wrong = {verdict.backend for verdict in found if verdict.state not in ("right", "declined")}
    gpu_record.note_passed(right - wrong, capability)
    write_line(f"Recorded in {gpu_record.path()}: {', '.join(sorted(right - wrong)) or 'none'}")


def on_gpus(device: int) -> list[str]:
    """Return what is to be checked: backends for GPUs that are available, and Gluon's kernel."""
    from specattn.backends.select import BACKENDS

    states = specattn.backends()
    names = [
        name
        for name, backend in BACKENDS.items()
        if "cuda" in backend.devices and not backend.slow and states[name] == "available"
    ]
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9
    return [*names, *(["gluon"] if "triton" in names and hopper else [])]


def checked(
    options: GpuCheckOptions, check: gpu_workers.Check = gpu_workers.on_gpu
) -> list[Verdict]:
    """Check all jobs, print each that is not right as it comes, and how many were what."""
    backends = on_gpus(options.device)
    if not backends:
        write_line("No backend for GPUs is available: install triton (and CuPy).")
        return []
    jobs, start = gpu_workers.jobs(backends, options.only), time.monotonic()
    workers = min(_WORKERS, os.cpu_count() or 1)
    found = []
    for verdict in gpu_workers.verdicts(jobs, options.device, workers, options.budget, check):
        found.append(verdict)
        if verdict.state != "right":
            write_line(
                f"{verdict.state.upper():8} {verdict.backend}: {verdict.case}: {verdict.said}"
            )
    for name in backends:
        counts = Counter(verdict.state for verdict in found if verdict.backend == name)
        text = ", ".join(f"{count} {state}" for state, count in counts.items())
        write_line(f"{name}: {text}")
    write_line(f"{len(found)} checks in {time.monotonic() - start:.0f} s")
    return found


def table(measured: list[gpu_times.Time]) -> Iterator[str]:
    """Yield the times as lines."""
    shape = f"{gpu_times.Q_HEADS} heads over {gpu_times.KV_HEADS}, D {gpu_times.D}, bf16"
    yield f"A chain of T rows over {gpu_times.KEYS} keys, one request, {shape}:"
    for row in measured:
        if row.seconds is None:
            yield f"  T={row.rows:<3} {row.name:30} not measured: {row.said}"
            continue
        rate = f"{row.seconds * 1e6:8.1f} us {row.bytes / row.seconds / 1e9:6.0f} GB/s"
        yield f"  T={row.rows:<3} {row.name:30} {rate}  {row.said}"
