"""What kernels say of a call: which forms its tensors have, and that it is not served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch


class NotServed(Exception):  # noqa: N818 - no error: the next backend takes the call
    """A kernel does not serve a call: nothing has happened, and the message says why."""


def picker(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    """Return a function that returns the items at some places of a sequence as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda sequence: tuple([sequence[place] for place in places])


def forms_of(args: Sequence) -> tuple:
    """Return what plans depend on of each argument: a tensor's form, None of anything else."""
    return tuple([_form(x) for x in args])


def _form(x: object) -> tuple | None:
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return None
