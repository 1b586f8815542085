"""Checks in processes of their own: kernels compile side by side, and one that dies costs few."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from typing import Any, NamedTuple

from specattn.gpu_checks.cases import CASES, Case, Verdict, check


class Job(NamedTuple):
    """A case on a backend."""

    backend: str
    case: Case


Check = Callable[[Job, int], list[Verdict]]


def on_gpu(job: Job, device: int) -> list[Verdict]:
    """Check a job on a GPU; where that leaves the GPU's context unusable, the process must end."""
    import torch

    torch.cuda.set_device(device)
    try:
        verdicts = check(job.case, job.backend, lambda x: x.cuda(), captures=True)
        torch.cuda.synchronize()
    except RuntimeError as error:
        text = " ".join(str(error).split())[:300]
        verdicts = [Verdict(job.backend, str(job.case), "failed", text)]
    return verdicts


def jobs(backends: Sequence[str], only: str | None = None) -> list[Job]:
    """Return what is to be checked, all backends of a case beside each other.

    Whole passes are made of kernels that Triton alone has: by another they would be refused.
    """
    chosen = [case for case in CASES if only is None or case.op == only]
    return [
        Job(backend, case)
        for case in chosen
        for backend in backends
        if backend == "triton" or case.call is None and (backend != "gluon" or case.is_gluons)
    ]


@dataclass
class _Worker:
    """A process, the pipe it answers by, and the jobs that it has not answered."""

    process: Any
    pipe: connection.Connection
    left: list[Job] = field(default_factory=list)


def verdicts(
    jobs: Sequence[Job], device: int, workers: int, seconds: float, check: Check = on_gpu
) -> Iterator[Verdict]:
    """Yield what becomes of all jobs, as it comes; after `seconds` the rest is given up.

    A process that dies loses the job that it was at; the others go to a new one.
    """
    context, until = get_context("spawn"), time.monotonic() + seconds
    running: list[_Worker] = []

    def start(share: list[Job]) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(share, device, check, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append(_Worker(process, ours, share))

    try:
        for number in range(min(workers, len(jobs))):
            start(list(jobs[number::workers]))
        while running:
            pipes = [worker.pipe for worker in running]
            ready = connection.wait(pipes, max(0.0, until - time.monotonic()))
            if not ready:
                break
            for worker in [x for x in running if x.pipe in ready]:
                try:
                    found = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    running.remove(worker)
                    worker.process.join()
                    left, code = worker.left, worker.process.exitcode
                    if left and code:
                        job, said = left.pop(0), f"its process ended with status {code}"
                        yield Verdict(job.backend, str(job.case), "lost", said)
                    if left:
                        start(left)
                    continue
                worker.left.pop(0)
                yield from found
        for worker in running:
            for job in worker.left:
                yield Verdict(job.backend, str(job.case), "not done", f"within {seconds:.0f} s")
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.join()


def _work(share: list[Job], device: int, check: Check, pipe: connection.Connection) -> None:
    """Answer jobs one by one, to the first that fails: it may have broken the GPU's context."""
    for job in share:
        found = check(job, device)
        pipe.send(found)
        if any(verdict.state == "failed" for verdict in found):
            return
