"""What a CUDA graph does, on a CPU: keeps operators and launches with their tensors, no Python."""

import importlib.util
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map


class Tape(TorchDispatchMode):
    """Keeps the operators that run in its context; one that asks the device is an error.

    Launches of Triton kernels outside of operators, which no dispatch mode sees, are kept, too.
    `kernels` names all that were launched, and torch's operators that compute. Unless ``launches``,
    no kernel runs, and what it would have computed is no number, or zero.
    """

    MEMORY = ("empty", "new_empty", "empty_like", "detach", "alias")

    ASKS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal")

    def __init__(self, launches=True):
        super().__init__()
        self.launches = launches
        self.operators, self.kernels = [], []

    def __enter__(self):
        self._unseen = _interpreted_unseen(self.launches)
        self._unseen.__enter__()
        _watch_launches(_Launches(self))
        return super().__enter__()

    def __exit__(self, *error):
        _watch_launches(None)
        self._unseen.__exit__(*error)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        if name in self.ASKS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        _watch_launches(_Launches(self, within=True))
        given = tree_map(lambda x: x, (args, kwargs or {}))  # lists as they are now
        results = function(*args, **(kwargs or {}))
        _watch_launches(_Launches(self))
        if not self.launches and (function.namespace != "aten" or name in self.MEMORY[:3]):
            _forget(given, results)
        if function.namespace == "aten" and not function.is_view and name not in self.MEMORY:
            self.kernels.append(name)
        self.operators.append((function, *given, results))
        return results


class _Launches:
    """Told by `specattn.triton_kernels._launch` what is launched, `within` an operator or not."""

    def __init__(self, tape, within=False):
        self.tape, self.within, self.launches = tape, within, self

    def append(self, launched):
        kernel, _, grid, args, options = launched
        self.tape.kernels.append(kernel.__name__)
        if self.within:  # the operator is kept as a whole
            return

        def again(*args, **options):
            kernel[grid](*args, **options)

        self.tape.operators.append((again, args, options, None))


@contextmanager
def _interpreted_unseen(runs):
    """Hide the operators by which Triton's interpreter handles a kernel's arguments, if it does."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def hidden(*args, **options):
        if not runs:
            return None
        with _disable_current_modes():
            return run(*args, **options)

    with patch.object(GridExecutor, "__call__", hidden):
        yield


def _watch_launches(tape):
    if importlib.util.find_spec("triton") is not None:
        from specattn.triton_kernels import _launch

        _launch._recording.tape = tape


class TapeGraph:
    """A `specattn.blocks.Graph` of operators on a CPU."""

    def __init__(self):
        self.tape, self.replays = Tape(launches=False), 0

    def capture(self, run):
        run()  # as for a CUDA graph
        with self.tape:
            run()
        for _, *given, results in self.tape.operators:  # capturing computes nothing
            _forget(given, results)
        self._computed = [
            (function, *given, _tensors(results))
            for function, *given, results in self.tape.operators
            if not _is_memory(function)  # what is in it comes later
        ]

    def replay(self):
        self.replays += 1
        for function, args, kwargs, kept in self._computed:
            for old, new in zip(kept, _tensors(function(*args, **kwargs)), strict=True):
                if _memory(old) != _memory(new):
                    old.copy_(new)


def _is_memory(function):
    """Whether an operator makes memory, or shows what lies in other memory."""
    is_operator = isinstance(function, torch._ops.OpOverload)
    return is_operator and ("empty" in function.name() or function.is_view)


def _tensors(results):
    """Return the tensors among results, which are one or are nested in lists and tuples."""
    if isinstance(results, (list, tuple)):
        return [x for result in results for x in _tensors(result)]
    return [results] if isinstance(results, torch.Tensor) else []


def _forget(given, results):
    """Let what an operator has computed, but in what it was given, be no number, or zero."""
    known = {_memory(x) for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)}
    for result in _tensors(results):
        if _memory(result) not in known:
            result.fill_(torch.nan if result.is_floating_point() else 0)


def _memory(x):
    return x.untyped_storage().data_ptr()
