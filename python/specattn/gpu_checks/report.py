"""The checks of `specattn gpu-check` as lines of a report, and what is recorded of them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch

import specattn
from specattn import gpu_record
from specattn.gpu_checks import times, workers
from specattn.gpu_checks.cases import Verdict

_WORKERS = 16  # processes that compile at once
_WRONG, _NOT_DONE = {"wrong", "failed", "lost"}, "not done"


def note(found: list[Verdict], capability: tuple[int, int]) -> str:
    """Record the backends of which something is right, and nothing wrong; return a line of it.

    Of which some checks were not done, those stay what they were.
    """
    names = {x.backend for x in found}
    states = {name: {x.state for x in found if x.backend == name} for name in names}
    passed = {
        name
        for name, of in states.items()
        if not of & _WRONG
        and (gpu_record.has_passed(name, capability) if _NOT_DONE in of else "right" in of)
    }
    gpu_record.note_passed(passed, capability)
    return f"Recorded in {gpu_record.path()}: {', '.join(sorted(passed)) or 'none'}"


def wrong(found: list[Verdict]) -> list[Verdict]:
    """Return those that say that something is not right."""
    return [verdict for verdict in found if verdict.state in _WRONG]


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
    device: int, only: str | None, budget: int, write: Callable[[str], None]
) -> list[Verdict]:
    """Check all jobs, write each that is not right as it comes, and how many were what."""
    backends = on_gpus(device)
    if not backends:
        write("No backend for GPUs is available: install triton (and CuPy).")
        return []
    jobs, start = workers.jobs(backends, only), time.monotonic()
    found = []
    for verdict in workers.verdicts(jobs, device, min(_WORKERS, os.cpu_count() or 1), budget):
        found.append(verdict)
        if verdict.state != "right":
            write(f"{verdict.state.upper():8} {verdict.backend}: {verdict.case}: {verdict.said}")
    for name in backends:
        counts = Counter(verdict.state for verdict in found if verdict.backend == name)
        write(f"{name}: {', '.join(f'{count} {state}' for state, count in counts.items())}")
    left = sum(verdict.state == _NOT_DONE for verdict in found)
    write(f"{len(found) - left} checks in {time.monotonic() - start:.0f} s")
    if left:
        write(f"{left} were not done: what was compiled is kept, so run it again, or give --budget")
    return found


def timed(device: int, found: list[Verdict]) -> Iterator[str]:
    """Yield a table of times: of what is right, and of other libraries."""
    torch.cuda.set_device(device)
    served = {verdict.backend for verdict in found if verdict.state == "right"}
    shape = f"{times.Q_HEADS} heads over {times.KV_HEADS}, D {times.D}, bf16"
    yield f"Chains over {times.KEYS} keys, one request, {shape}:"
    for row in times.times([name for name in on_gpus(device) if name in served]):
        if row.seconds is None:
            yield f"  rows={row.rows:<3} {row.name:30} not measured: {row.said}"
            continue
        rate = f"{row.seconds * 1e6:8.1f} us {row.bytes / row.seconds / 1e9:6.0f} GB/s"
        yield f"  rows={row.rows:<3} {row.name:30} {rate}  {row.said}"
    for name, why in times.absent().items():
        yield f"  {name} takes no part: {why}"
