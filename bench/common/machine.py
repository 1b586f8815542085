"""What a figure was measured on: machine, versions, commit, and how busy others kept it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from specattn.backends.select import BACKENDS

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "transformers", "numpy")
DISTURBING = 0.2  # cores that others use, from which on absolute times mean little


def describe(device: torch.device) -> dict:
    """Return everything a reader needs to judge a figure, ready for JSON."""
    host = {"cpu": _cpu_model(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    with suppress(ImportError):  # of a checkout whose kernels for CPUs were not built
        from specattn import _cpu

        host["kind"] = _cpu.machine()  # the name alone may be "AMD EPYC", of any year
    machine = {"name": f"{host['cpu']}, {host['threads']} threads", "device": "cpu"}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        machine = {
            "name": card.name,
            "device": "cuda",
            "multiprocessors": card.multi_processor_count,
            "capability": f"{card.major}.{card.minor}",
        }
    return {
        "machine": machine | host,
        "versions": {
            "python": platform.python_version(),
            **dict(zip(PACKAGES, map(_version, PACKAGES), strict=True)),
        },
        "commit": _commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def heading(run: dict) -> str:
    """Return the machine of a run's record, its commit and backend, as text."""
    machine = run["machine"]
    parts = [machine["name"], f"commit {run['commit']}", f"torch {run['versions']['torch']}"]
    if "kind" in machine:
        parts.insert(1, machine["kind"])
    return " | ".join(parts + ([f"backend {run['backend']}"] if "backend" in run else []))


def serving(device: torch.device) -> str:
    """Return the backend that serves this device where it has the primitive."""
    return next(
        backend.name
        for backend in BACKENDS.values()
        if device.type in backend.devices and backend.why_not(None) is None
    )


def last_level_cache(device: torch.device) -> int:
    """Return the bytes of cache that must be flushed before a read counts as cold."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    found = [int(text[:-1]) * units[text[-1]] for text in (p.read_text().strip() for p in sizes)]
    return max(found, default=64 << 20)


def free_memory(device: torch.device) -> int:
    """Return the bytes that a new tensor can have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the short commit, with ``+`` when tracked files differ from it; None outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def disturbed(rows: Sequence[dict]) -> str:
    """Return how many rows were measured while others used the machine, as text."""
    count = sum((row.get("others") or 0.0) > DISTURBING for row in rows)
    said = f"{count} of {len(rows)} rows were measured while others used the machine"
    return said if count else ""
