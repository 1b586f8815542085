"""Memory: what a run had at most, of a GPU or a Linux process, and what is left."""

from __future__ import annotations

from pathlib import Path

import torch

PROC = Path("/proc")


def reset_peak(device: torch.device, process: int | str = "self") -> None:
    """Let `peak_bytes` count from here on; `process` is whose memory counts on a CPU."""
    clear = PROC / str(process) / "clear_refs"
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif clear.exists():
        clear.write_text("5")  # Linux: the largest resident size starts anew


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that could still be had: of a GPU, or as Linux says; elsewhere None."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    file = PROC / "meminfo"
    lines = file.read_text().splitlines() if file.exists() else ()
    return next((int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable")), None)


def peak_bytes(device: torch.device, process: int | str = "self") -> int | None:
    """Return the largest memory since `reset_peak`, weights and caches included.

    On a GPU what torch has allocated there; else the whole process' resident memory, which Linux
    alone says: elsewhere None.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    folder = PROC / str(process)
    if not (folder / "clear_refs").exists():
        return None
    lines = (folder / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
