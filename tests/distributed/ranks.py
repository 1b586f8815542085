"""Ranks in processes of their own, which run functions of the tests together."""

import datetime
import multiprocessing
import socket

import pytest

from tests import HANGS


def forkserver():
    """Return what starts processes, from one that has imported what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["specattn.decoding", "specattn.distributed"])
    return context


class Ranks:
    """`size` processes over gloo, of one thread each; ``ranks(function, *arguments)`` on all.

    After a call that hangs the next one has new processes, so that it does not get the late answer.
    """

    def __init__(self, size, timeout=HANGS):
        self.size, self.timeout = size, timeout
        self.pipes, self.processes = [], []
        self._begin()

    def _begin(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = forkserver()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.size, port, self.timeout)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, function, *arguments):
        """Let every rank call ``function(*arguments)``."""
        if not self.processes:
            self._begin()
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def result(self, rank):
        """Return what a rank's call returned, or the exception that it raised."""
        if not self.pipes[rank].poll(HANGS):
            self.close()
            pytest.fail(f"rank {rank} hangs")
        return self.pipes[rank].recv()

    def __call__(self, function, *arguments):
        """Return the results of all ranks."""
        self.start(function, *arguments)
        results = [self.result(rank) for rank in range(self.size)]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []


def _serve(pipe, rank, size, port, timeout):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=HANGS),
    )
    dist.barrier()  # one may have started long after another; the limit is for what follows
    limit = datetime.timedelta(seconds=timeout)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*arguments))
        except Exception as error:
            pipe.send(error)
