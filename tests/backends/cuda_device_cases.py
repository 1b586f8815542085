"""The emulator's cases of the CUDA kernels, on the tensors of a device."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from tools.ptx.cuda_launch import split_by
from tools.ptx.cuda_stub import timed_cuda
from tools.ptx.tests import checks, selections

import specattn

_PRIMITIVES = (
    "hybrid_tree_attention", "verify_attention", "sparse_gather_attention", "tree_attention",
    "select_topk",
)  # fmt: skip


@contextmanager
def on_device(device, split_size=None, **_):
    """Serve calls on CPU tensors by the CUDA kernels, on copies that a device has; yield []."""

    def moved(function):
        def call(*args, **options):
            there = {name: _copied(x, device) for name, x in options.items()}
            return tuple(x.cpu() for x in function(*(_copied(x, device) for x in args), **there))

        return call

    with ExitStack() as stack:
        for name in _PRIMITIVES:
            function = moved(getattr(specattn, name))
            stack.enter_context(mock.patch.object(specattn, name, function))
        stack.enter_context(split_by(split_size))
        stack.enter_context(specattn.use_backend("cuda"))
        yield []


def _copied(x, device):
    """Return a tensor's copy with its strides: a vast one is as vast there."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def check(case, device):
    """Run a case on a device and hold it against float64."""

    def emulate(arch, options, change, **forced):
        return on_device(device, **forced)

    checks.check(case, None, emulate=emulate)


def check_selections(device, seeds):
    """Select on a device, of whole rows and of shares."""
    selections.check_rows_and_shares(lambda: on_device(device), seeds)


def what_is_said_of_kernels_that_do_nothing(case):
    """Return the failure of a case, or of selections, on a GPU whose kernels do nothing."""
    with timed_cuda():
        try:
            check(case, "cpu") if case else check_selections("cpu", range(3))
        except AssertionError as failure:
            return str(failure)
    return "nothing"


def check_in_the_emulator(case):
    """Run what a device runs where kernels are emulated: it must pass."""
    from tools.ptx.cuda_launch import emulated_cuda

    with emulated_cuda("sm_90a") as launches:
        check(case, "cpu") if case else check_selections("cpu", range(3))
    return len(launches)
