"""Launches: on the device of the tensors, in its current stream, and prepared once per form.

A kernel's Python function decides tiles, splits and arguments from the forms of its tensors (shape,
strides, dtype, device) and from plain values, never from what tensors hold. So its first call with
a form is recorded as a `Plan`: which launches, with which arguments, over which of the tensors and
workspaces. Later calls fill in addresses and launch. What cannot be recorded runs as it is written.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import driver

from ..call_forms import NotServed, forms_of, picker
from . import _configs, _miscompiled
from ._bfloat16 import INTERPRETED

_ALIGNMENT = 16  # bytes; at others Triton compiles another kernel
_PLACE = 256  # bytes between workspaces, as torch's allocator aligns tensors
_MOST_PLANS = 1024  # per primitive; then all are forgotten
_GPUS = ("cuda",)  # device types; others run in Triton's interpreter, and without plans
_ALLOCATIONS = {
    getattr(torch.ops.aten, f"{name}empty{end}")
    for name, end in (("", ""), ("new_", ""), ("", "_like"), ("", "_strided"))
}
_recording = threading.local()


def launch(kernel, grid, *args, **options):
    """Launch a kernel on the device of its tensors, in that device's current stream.

    Raises `NotServed` before it runs where its compiler has got it wrong. While kernels are
    compiled ahead (`_ahead`) it is compiled alone.
    """
    with _on(next(x.device for x in args if isinstance(x, torch.Tensor))):
        if not INTERPRETED.value:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            if compiles():
                return
            if reason := _miscompiled.why_not(compiled):
                raise NotServed(reason)
        compiled = kernel[grid](*args, **options)
    tape = getattr(_recording, "tape", None)
    if tape is not None:
        tape.launches.append((kernel, compiled, grid, args, options))


def compiles():
    """Return whether this thread only compiles what it would launch."""
    return getattr(_recording, "compiles", False)


def early(device):
    """Return the options of a kernel that begins with `follow_previous`.

    On GPUs that let it start early its launch overlaps with the end of the one before, in whose
    place it waits before it looks at memory; so it makes no difference which one that is.
    """
    pdl = _configs.starts_early(device)
    return {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}


def strides(tensor):
    """Return the strides, 0 along dimensions of size 1: what is shared is broadcast.

    torch leaves those of size 1 as they come, and others would compile other kernels.
    """
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    return [0 if size == 1 else stride for size, stride in sizes_and_strides]


def collected_strides(collected):
    """Return the strides over requests, rows and heads; scores have no rows."""
    if collected is None:
        return 0, 0, 0
    if collected.dim() == 3:
        return collected.stride(0), 0, collected.stride(1)
    return collected.stride()[:3]


@contextmanager
def _on(device):
    """Make a GPU the current device; nothing for others, which only tests and compilers have."""
    if device.type not in _GPUS:
        yield
        return
    active = driver.active
    previous = active.get_current_device()
    if previous == device.index:
        yield
        return
    active.set_current_device(device.index)
    try:
        yield
    finally:
        active.set_current_device(previous)


class Prepared:
    """A kernel's Python function that plans each form of its arguments once.

    Parameters
    ----------
    function : callable
        Takes an operator's arguments. Beside launches it may allocate workspace and view tensors;
        with any other operator in it, it is never planned.
    plain : sequence of int
        Which arguments are no tensors. These, the forms of the tensors and whether pairs begin at
        one address decide everything.
    pairs : sequence of (int, int)
        Arguments of which the second may be a view of the first.
    """

    def __init__(
        self,
        function: Callable[..., None],
        plain: Sequence[int],
        pairs: Sequence[tuple[int, int]] = (),
    ):
        self.function, self.plain, self.pairs = function, picker(plain), tuple(pairs)
        self.plans: dict[tuple, Plan] = {}

    def __call__(self, *args, form=None):
        """Run on the operator's arguments; equal ``form`` promises tensors of equal forms."""
        if args[0].device.type not in _GPUS or _configs._forced or compiles():
            self._as_written(args)
            return
        if form is None:
            form = forms_of(args)
        views = tuple([v for k, v in self.pairs if _is_view(args[k], args[v])])
        key = form, self.plain(args), views
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= _MOST_PLANS:
                self.plans.clear()
            self.plans[key] = self._recorded(args, views)
        elif not plan.run(args):
            self._as_written(args)

    def _as_written(self, args):
        with torch.no_grad():
            self.function(*args)

    def _recorded(self, args, views):
        """Run as written, and return the plan of it."""
        tape = Tape()
        _recording.tape = tape
        try:
            with torch.no_grad(), tape:
                self.function(*args)
        finally:
            _recording.tape = None
        return tape.plan(args, views)


def _is_view(k, v):
    return k is not None and v is not None and k.data_ptr() == v.data_ptr()


class Tape(TorchDispatchMode):
    """Sees what a function launches and allocates, and whether it does anything else."""

    def __init__(self):
        super().__init__()
        self.launches, self.workspaces, self.plain = [], [], True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run an operator of torch's."""
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _ALLOCATIONS:
            self.workspaces.append(result)
        elif not function.is_view:
            self.plain = False
        return result

    def plan(self, args, views=()):
        """Return the plan of what was seen; an empty one where it is not to be repeated.

        ``views`` are arguments that begin where others do, as they will in every repetition.
        """
        sources = {
            i: x.data_ptr()
            for i, x in enumerate(args)
            if isinstance(x, torch.Tensor) and i not in views
        }
        if not self.plain or len(set(sources.values())) < len(sources):
            return NOTHING
        places, at = [], 0
        for workspace in self.workspaces:
            places.append(at)
            at += -(-workspace.nbytes // _PLACE) * _PLACE
        pool = [*sources.values(), *(x.data_ptr() for x in self.workspaces)]
        where = {address: number for number, address in enumerate(pool)}
        steps = [_step(*launched, where, len(pool)) for launched in self.launches]
        if not steps or None in steps:
            return NOTHING
        return Plan(args[0].device, tuple(sources), at, tuple(places), tuple(steps))


class Step(NamedTuple):
    """One launch: what starts it, its grid, and the kernel's arguments, tensors before all others.

    ``tail`` is the function, how it is packed, and no hooks. ``pick`` takes the tensors' addresses,
    None for those that are not given, from the pool that a `Plan` fills, and describes to TMA what
    lies there; ``rest`` never changes.
    """

    launcher: Callable
    grid: tuple
    tail: tuple
    pick: Callable
    rest: tuple


def _step(kernel, compiled, grid, args, options, where, nothing):
    """Return a launch as a step, or None if it cannot be repeated."""
    if not hasattr(compiled, "packed_metadata"):
        return None  # it was interpreted, or recorded
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | options
    values = [arguments[name] for name in kernel.arg_names]
    described = [(i, value) for i, value in enumerate(values) if hasattr(value, "block_shape")]
    for i, descriptor in described:
        values[i] = descriptor.base
    last = max(i for i, value in enumerate(values) if isinstance(value, torch.Tensor))
    numbers = []
    for value in values[: last + 1]:
        if value is None:
            numbers.append(nothing)
            continue
        if not isinstance(value, torch.Tensor) or value.data_ptr() not in where:
            return None
        if value.data_ptr() % _ALIGNMENT:
            return None
        numbers.append(where[value.data_ptr()])
    tail = (compiled.function, compiled.packed_metadata, None, None, None)
    rest = tuple(values[last + 1 :])
    pick = picker(numbers)
    if described:
        pick = _describing(pick, described)
    return Step(compiled.run, (*grid, 1, 1)[:3], tail, pick, rest)


class Address(int):
    """An address where Triton asks a tensor for its own."""

    data_ptr = int.__int__


def _describing(pick, described):
    """Return a ``pick`` that turns the addresses at some places into descriptors like those."""

    def pick_and_describe(pool):
        values = list(pick(pool))
        for place, like in described:
            descriptor = object.__new__(type(like))  # without the checks that `like` has passed
            descriptor.__dict__ = like.__dict__ | {"base": Address(values[place])}
            values[place] = descriptor
        return values

    return pick_and_describe


class Plan(NamedTuple):
    """Launches over the tensors among a call's arguments, ``used``, and ``workspace`` bytes.

    ``places`` are where workspaces begin in those. The pool of addresses is in this order, with
    None behind them.
    """

    device: torch.device | None
    used: tuple
    workspace: int
    places: tuple
    steps: tuple

    def run(self, args) -> bool:
        """Launch; False where it cannot be done so, and nothing happened."""
        if not self.steps or _hooked():
            return False
        pool, together = [args[place].data_ptr() for place in self.used], 0
        for address in pool:
            together |= address
        if together % _ALIGNMENT:
            return False
        if self.workspace:
            buffer = torch.empty(self.workspace, dtype=torch.uint8, device=self.device)
            first = buffer.data_ptr()
            pool += [first + place for place in self.places]
        pool.append(None)
        active, index = driver.active, self.device.index
        if active.get_current_device() == index:
            self._launch(pool, active.get_current_stream(index))
        else:
            with _on(self.device):
                self._launch(pool, active.get_current_stream(index))
        return True

    def _launch(self, pool, stream):
        for launcher, grid, tail, pick, rest in self.steps:
            launcher(*grid, stream, *tail, *pick(pool), *rest)


NOTHING = Plan(None, (), 0, (), ())


def _hooked():
    """Return whether a profiler of Triton's wants to see launches."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
