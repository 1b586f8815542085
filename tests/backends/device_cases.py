"""The emulator's cases, on the tensors of a device."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from specattn.triton_kernels import _configs
from tools.ptx.cuda_launch import split_by
from tools.ptx.cuda_stub import timed_cuda
from tools.ptx.tests import checks, linear, rounds, selections

import specattn

_PRIMITIVES = (
    "hybrid_tree_attention", "verify_attention", "sparse_gather_attention", "tree_attention",
    "importance_scores", "select_topk", "merge_state", "merge_states", "write_kv",
    "add_gumbel_noise", "linear_few_rows",
)  # fmt: skip
_VAST = 2**30  # bytes of a storage that is copied in parts


@contextmanager
def on_device(device, backend, split_size=None, **forced):
    """Serve calls on CPU tensors by a backend, on copies that a device has; yield []."""

    def moved(function):
        def call(*args, **options):
            copies = Copies(device)
            given = [copies.of(x) for x in args], {n: copies.of(x) for n, x in options.items()}
            result = function(*given[0], **given[1])
            if result is not None:
                return tuple(x.cpu() for x in result) if isinstance(result, tuple) else result.cpu()
            for name, x in options.items():  # what it has written
                if isinstance(x, torch.Tensor):
                    x.copy_(given[1][name])
            return None

        return call

    with ExitStack() as stack:
        for name in _PRIMITIVES:
            function = moved(getattr(specattn, name))
            stack.enter_context(mock.patch.object(specattn, name, function))
        if backend == "cuda":
            stack.enter_context(split_by(split_size))
        else:
            stack.enter_context(_configs.forced(split_size=split_size, **forced))
        stack.enter_context(specattn.use_backend(backend))
        yield []


class Copies:
    """Copies of tensors on a device, with their strides; those that share memory share it there."""

    def __init__(self, device):
        self.device, self.storages = device, {}

    def of(self, x):
        """Return the copy of a tensor, or what is none."""
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        if storage.nbytes() > _VAST:
            return torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device=self.device
            ).copy_(x)
        key = storage.data_ptr()
        if key not in self.storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[key] = whole.to(self.device, copy=True).untyped_storage()
        there = torch.empty(0, dtype=x.dtype, device=self.device)
        return there.set_(self.storages[key], x.storage_offset(), x.shape, x.stride())


def check(case, device, backend):
    """Run a case on a device and hold it against float64."""

    def emulate(arch, options, change, **forced):
        if backend == "triton":
            forced |= {"least": 64, "hopper": case.may_be_gluons}
        return on_device(device, backend, **forced)

    checks.check(case, None, emulate=emulate)


def check_layers(device):
    """Run the emulator's layers of few rows on a device, and rows among others."""

    def emulate(arch, options):
        return on_device(device, "triton")

    for layer in linear.LAYERS.values():
        linear.check_layer(layer, None, emulate=emulate)
    for dtype in (linear.BF16, linear.FP16, linear.FP32):
        linear.check_bits(75, dtype, None, emulate)


def check_rounds(device):
    """Draw, walk and move on a device as in the emulator."""

    def emulate(arch, order):
        return specattn.use_backend("triton")

    options = {"emulate": emulate, "device": device}
    rounds.check_draws(None, range(60), **options)
    rounds.check_draws(None, range(20), 300, 9, **options)
    rounds.check_moves(None, range(60), **options)


def check_selections(device, seeds):
    """Select on a device with the CUDA kernels, of whole rows and of shares."""
    selections.check_rows_and_shares(lambda: on_device(device, "cuda"), seeds)


def what_is_said_of_kernels_that_do_nothing(case):
    """Return the failure of a case, or of selections, on a GPU whose kernels do nothing."""
    with timed_cuda():
        try:
            check(case, "cpu", "cuda") if case else check_selections("cpu", range(3))
        except AssertionError as failure:
            return str(failure)
    return "nothing"


def check_in_the_emulator(case):
    """Run what a device runs where kernels are emulated: it must pass."""
    from tools.ptx.cuda_launch import emulated_cuda

    with emulated_cuda("sm_90a") as launches:
        check(case, "cpu", "cuda") if case else check_selections("cpu", range(3))
    return len(launches)
