"""Whether passes of a model are replayed without Python: where that was seen to be the same."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal, get_args
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from specattn.backends.select import chosen
from specattn.decoding.model.parts import Unrecognised, parts_of
from specattn.decoding.passes.proving import BOUNDS

if TYPE_CHECKING:
    from specattn.decoding.engine.target import Target
    from specattn.decoding.passes.captured_pass import CapturedPass
    from specattn.decoding.passes.static_pass import StaticPass

Compile = Literal["auto", "on", "off"]
"""Whether passes of few rows are replayed: where that is right, or else an error, or never."""

MOST_ROWS = 128
"""Rows of a compiled pass, all requests together; torch's own products are better for more."""

_PROBE_ROWS = 16

_proven: WeakSet[PreTrainedModel] = WeakSet()
_told: WeakSet[PreTrainedModel] = WeakSet()


def static_pass(target: Target, compile: Compile) -> StaticPass | CapturedPass | None:
    """Return what runs the passes of few rows of a target whose cache is empty, if it can.

    The first time that a model is seen, random tokens run both ways and are compared. Models for
    which there is none decode through their own modules, and "auto" says so once, on rank 0.

    Raises
    ------
    ValueError
        `compile` is none of its values, or "on" where it cannot be.
    """
    if compile not in get_args(Compile):
        raise ValueError(f"compile must be one of {get_args(Compile)}, got {compile!r}")
    if compile == "off":
        return None
    model, storage = target.model, target.cache.storage
    _, backend = chosen("hybrid_tree_attention", storage.device, storage.dtype)
    if target.cache.batch_size > MOST_ROWS:
        return None  # no pass is small enough
    captures = storage.is_cuda and target.cache.in_kernels
    if backend.name != "cpu" and not captures:
        if compile == "on":
            what = f"{storage.dtype} on {storage.device}"
            raise ValueError(f"compile='on': {what} is served by the {backend.name} backend")
        return None
    try:
        return _captured_pass(target) if captures else _proven_pass(target)
    except Unrecognised as error:
        if compile == "on":
            raise ValueError(f"compile='on': {error}") from error
        first = target.lockstep is None or target.lockstep.ranks.rank == 0
        if model not in _told and first:
            _told.add(model)
            name = type(model).__name__
            warnings.warn(f"{name} decodes through its own, slower modules: {error}", stacklevel=3)
        return None


def _proven_pass(target: Target) -> StaticPass:
    from specattn.decoding.passes.static_pass import StaticPass  # imports the C++ kernels

    static = StaticPass(parts_of(target.model), target.cache, target.windows)
    # Ranks that share a cache must all run the same passes, whatever each has seen before.
    if target.model not in _proven or target.lockstep is not None:
        error, bound = _error(target, static), BOUNDS[target.model.dtype]
        if not error <= bound:
            raise Unrecognised(f"computed from its parts, features differ by {error:.1e}")
        _proven.add(target.model)
    return static


def _captured_pass(target: Target) -> CapturedPass:
    from specattn.decoding.passes.captured_pass import CapturedPass

    captured = CapturedPass(target)
    if target.model in _proven:
        return captured
    try:
        error, bound = _error(target, captured), BOUNDS[target.model.dtype]
    except RuntimeError as reason:  # such as a mixture of experts that asks the device
        first = str(reason).strip().splitlines()[0]
        raise Unrecognised(f"a pass cannot be captured: {first}") from reason
    if not error <= bound:
        raise Unrecognised(f"replayed, features differ by {error:.1e}")
    _proven.add(target.model)
    return captured


@torch.no_grad()
def _error(target: Target, static: StaticPass | CapturedPass) -> float:
    """Return the median over rows of the relative difference of features, of random tokens."""
    generator = torch.Generator().manual_seed(0)
    batch = target.cache.batch_size
    rows = min(_PROBE_ROWS, target.cache.capacity, MOST_ROWS // batch)
    size = (batch, rows)
    tokens = torch.randint(target.model.config.vocab_size, size, generator=generator)
    tokens = tokens.to(target.device)
    expected = target.features(tokens, target.plan(rows)).double()
    found = static.run(target.plan(rows), tokens)[1].double()
    return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median().item()
