"""The implementations that a test of all primitives runs on, one after the other."""

from contextlib import contextmanager

import torch
from specattn.triton_kernels import _configs

import specattn


def paths(*backends):
    """Return what `forced` takes: the named backends that this machine has.

    The C++ kernels stand there once for each of their code paths, as "cpu, avx2".
    """
    available = [name for name in backends if specattn.backends().get(name) == "available"]
    if "cpu" not in available:
        return available
    from specattn import _cpu

    others = [name for name in available if name != "cpu"]
    return [*others, *(f"cpu, {isa}" for isa in _cpu.isas())]


@contextmanager
def forced(path):
    """Run primitives by one implementation: a backend, or a code path of the C++ kernels."""
    backend, _, isa = path.partition(", ")
    with specattn.use_backend(backend):
        if backend == "triton":
            with _configs.forced(block_n=16, split_size=32):
                yield
        elif isa:
            from specattn import _cpu

            before = _cpu.isa(), torch.get_num_threads()
            _cpu.use_isa(isa)
            torch.set_num_threads(2)
            try:
                yield
            finally:
                _cpu.use_isa(before[0])
                torch.set_num_threads(before[1])
        else:
            yield
