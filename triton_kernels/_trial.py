"""Holds a kernel against another one, the first time that it runs on a device.

What passed on our GPUs passed as it was then, by the compiler of that day. What is newer is used on
a GPU once it has agreed there; what differs or fails is not, which is said once.
"""

import warnings

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import gpu_record
from ..call_forms import NotServed
from . import _configs, _launch

_agreed: dict[tuple, bool] = {}  # by kernel and device


def passes(kernel, results, run, run_other) -> bool:
    """Return whether a kernel gives what another does; found out at its first call on a device.

    Parameters
    ----------
    kernel : tuple
        What it is called in warnings, and what tells it from others.
    results : sequence of Tensor or None
        What a call writes; it is only looked at for shapes and types.
    run, run_other : callable
        Write into tensors like these.
    """
    device = results[0].device
    if device.type != "cuda" or _configs._forced:
        return True
    known = _agreed.get((*kernel, device.index))
    if known is None and _launch.compiles():  # nothing runs that could be compared
        run_other(*results)
        return True
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        known = _agreed[(*kernel, device.index)] = _agree(kernel, results, run, run_other)
    return known


def _agree(kernel, results, run, run_other):
    tape, _launch._recording.tape = getattr(_launch._recording, "tape", None), None
    try:
        with _disable_current_modes():  # no part of the plan that is being made
            others = [x if x is None else torch.zeros_like(x) for x in results]
            ours = [x if x is None else torch.zeros_like(x) for x in results]
            run_other(*others)
            run(*ours)
            problem = gpu_record.difference(ours, others)
    except (NotServed, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a compiler or driver of another release says
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        _launch._recording.tape = tape
    if problem:
        warnings.warn(f"specattn: {kernel[0]}: {problem}; others serve such calls from now")
    return problem is None
