"""Compiles kernels ahead of their first launch, several at a time, and launches nothing meanwhile.

Triton compiles where a launch finds no kernel, one after the other: some 35 kernels before a model
on a GPU has said its first words, of which one by Gluon alone takes seconds.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager

from triton.runtime import _async_compile

from ._launch import _recording


@contextmanager
def compiling():
    """Compile what this thread would launch, in as many threads as there are cores.

    Results of launches mean nothing: their memory stays as it is. Leaving waits for all kernels.
    Another thread that launches one of them waits for it, too.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        mode = _Mode(pool)
        token, _recording.compiles = _async_compile.active_mode.set(mode), True
        try:
            yield
        finally:
            _recording.compiles = False
            _async_compile.active_mode.reset(token)
            mode.finish()


class _Pending:
    """Stands for a kernel until it is compiled: whoever asks it for anything waits."""

    def __init__(self, future: Future):
        self._future = future
        self._finished: list[tuple[Callable, Callable | None]] = []

    def __getattr__(self, name):
        return getattr(self._future.result(), name)


class _Mode:
    """What Triton gives kernels to that are to be compiled, each once; its own waits for none."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool = pool
        self.pending: dict[str, _Pending] = {}

    def submit(self, key, compile_kernel, keep, drop=None):
        """Return what stands for a kernel; later ``keep(kernel)``, or ``drop(stand_in)``."""
        if key not in self.pending:
            self.pending[key] = _Pending(self.pool.submit(compile_kernel))
        self.pending[key]._finished.append((keep, drop))
        return self.pending[key]

    def finish(self):
        """Put kernels in the places of what stands for them, as they come.

        What cannot be compiled is an error where it is launched, not here.
        """
        waiting = {one._future: one for one in self.pending.values()}
        for future in as_completed(waiting):
            stand_in, failed = waiting[future], future.exception() is not None
            for keep, drop in stand_in._finished:
                if not failed:
                    keep(future.result())
                elif drop is not None:
                    drop(stand_in)
