"""Memory: what a run had at most, of a GPU or a Linux process, what is left, what graphs take."""

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


def graph_bytes(device: torch.device) -> int:
    """Return what the pools of this process' CUDA graphs hold on a GPU; elsewhere 0.

    That is what graphs compute in and hand out, workspaces of their kernels included. What the
    driver keeps of launches lies outside torch's memory.
    """
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


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
