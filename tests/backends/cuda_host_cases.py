"""What the host does for calls of the CUDA kernels, on GPUs that are not there."""

import os
import struct
from dataclasses import replace
from unittest import mock

from tools.ptx import cuda_stub
from tools.ptx.cuda_stub import recorded_cuda

import specattn
from specattn.backends import select, triton
from specattn.backends.cuda import attention
from tests.triton_kernels import host_cases


def places(device):
    """Return (program, device, stream) of all launches on one GPU, and the current device after."""
    served = ("hybrid_tree_attention", "verify_attention", "sparse_gather_attention")
    served += ("merge_state", "merge_states")
    with recorded_cuda() as driver:
        for function, arguments in host_cases.on_device(device):
            if function.__name__ in served:
                for _ in range(2):
                    function(**arguments)
        return [(x.program, x.device, x.stream) for x in driver.launches], driver.device


def addresses():
    """Call twice with other tensors of the same forms; return what each launch and caller had."""
    given, told = [], []
    with recorded_cuda() as driver:
        for _ in range(2):
            arguments = host_cases.hybrid(N=512)
            specattn.hybrid_tree_attention(**arguments)
            names = {"lengths": "cache_seqlens", "cache_seqlens": "none"}
            given.append(
                {
                    name: getattr(arguments.get(names.get(name, name)), "data_ptr", int)()
                    for name in attention.ADDRESSES
                    if name not in ("partials", "counters")
                }
            )
            values = struct.unpack_from(f"<{len(attention.ADDRESSES)}Q", driver.launches[-1].values)
            told.append(dict(zip(attention.ADDRESSES, values, strict=True)))
        planned = len({id(ready) for ready in driver.ready})
    return given, told, planned


def refusal_of(options):
    """Return the message of a call that the forced backend does not serve."""
    with recorded_cuda():
        try:
            specattn.hybrid_tree_attention(**host_cases.hybrid(N=512, **options))
        except RuntimeError as error:
            return str(error)
    return "served"


def operators_within_a_window(primitive):
    """Return what `host_cases.operators_within_a_window` does."""
    return host_cases.operators_within_a_window(host_cases.FUNCTIONS[primitive], recorded_cuda)


def slower_is_left(rows=12, gpu="", table=None):
    """Return what 5 times so many rows launch: forced, and chosen while Triton is there.

    ``table`` names a folder with a table of who was fastest on a GPU.
    """
    launched = []
    with (
        mock.patch.dict(os.environ, SPECATTN_CACHE=str(table)),
        mock.patch.object(cuda_stub, "H200", cuda_stub.H200._replace(name=gpu)),
        recorded_cuda() as driver,
    ):
        for forced in (True, False):
            driver.launches.clear()
            there = replace(triton.BACKEND, why_not=lambda device: None, find=lambda op: _nothing)
            with (
                mock.patch.object(triton, "BACKEND", there),
                mock.patch.dict(select.BACKENDS, triton=there),
                mock.patch.object(select, "_forced", "cuda" if forced else None),
            ):
                select._chosen.cache_clear()
                specattn.hybrid_tree_attention(**host_cases.hybrid(T=rows, N=512))
            launched.append(driver.launches[-1].program if driver.launches else "no launch")
    return launched


def _nothing(*args, form=None):
    """Stand for a kernel of Triton."""
