"""Chooses a target's runner: kernels or CUDA graphs where they were seen to agree with modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, get_args

import torch

from specattn.backends.select import chosen
from specattn.blocks import Unrecognised
from specattn.decoding.model.model import Model
from specattn.decoding.passes.cached_model import CachedModel
from specattn.decoding.passes.graphs import GraphRunner
from specattn.decoding.passes.proving import BOUNDS
from specattn.decoding.passes.runner import (
    MOST_ROWS,
    KernelRunner,
    LayerAttention,
    Runner,
)

Compile = Literal["auto", "on", "off"]
"""Whether passes of few rows are replayed: where that is right, or else an error, or never."""

_PROBE_ROWS = 16


def runner_of(
    target: CachedModel,
    compile: Compile,
    attention: LayerAttention,
    *,
    compared: bool = False,
    quiet: bool = False,
) -> Runner:
    """Return what runs the passes of a target whose cache has room for a token.

    The first time that a model is seen, random tokens run both ways and are compared: in any case
    if `compared`, for ranks that share a cache must all run the same passes. Models for which there
    is no other way decode through their own modules, and "auto" says so once, if not `quiet`.
    ValueError: `compile` is none of its values, or "on" where it cannot be.
    """
    if compile not in get_args(Compile):
        raise ValueError(f"compile must be one of {get_args(Compile)}, got {compile!r}")
    modules, storage = Runner(target.model), target.cache.storage
    if compile == "off" or target.cache.batch_size > MOST_ROWS:  # no pass is small enough
        return modules
    _, backend = chosen("hybrid_tree_attention", storage.device, target.cache.dtype)
    captures = storage.is_cuda and target.cache.in_kernels
    if backend.name != "cpu" and not captures:
        if compile == "on":
            what = f"{target.cache.dtype} on {storage.device}"
            raise ValueError(f"compile='on': {what} is served by the {backend.name} backend")
        return modules
    try:
        if captures:
            return _compared(target, lambda: GraphRunner(target.model), compared)
        return _compared(target, lambda: KernelRunner(target.model, attention), compared)
    except Unrecognised as error:
        if compile == "on":
            raise ValueError(f"compile='on': {error}") from error
        if not quiet:
            reason = str(error)
            Model.of(target.model).recall("told", lambda: _tell(target, reason))
        return modules


def _tell(target: CachedModel, reason: str) -> None:
    name = type(target.model).__name__
    warnings.warn(f"{name} decodes through its own, slower modules: {reason}", stacklevel=6)


def _compared(target: CachedModel, make: Callable[[], Runner], anew: bool) -> Runner:
    """Return a runner whose passes were seen to be the model's own."""
    runner, known = make(), Model.of(target.model)
    kind = "replayed", target.model.dtype, target.device, target.cache.stored
    if anew or not known.knows(kind):
        _check(target, runner)
        known.recall(kind, lambda: True)
    return runner


def _check(target: CachedModel, runner: Runner) -> None:
    """Raise `Unrecognised` where a runner computes something else than the model's modules."""
    try:
        error, bound = _error(target, runner), BOUNDS[target.model.dtype]
    except RuntimeError as reason:  # such as a mixture of experts that asks the device
        if not isinstance(runner, GraphRunner):
            raise
        first = str(reason).strip().splitlines()[0]
        raise Unrecognised(f"a pass cannot be captured: {first}") from reason
    if not error <= bound:
        raise Unrecognised(f"{runner.how}, features differ by {error:.1e}")


@torch.no_grad()
def _error(target: CachedModel, runner: Runner) -> float:
    """Return the median over rows of the relative difference of features, of random tokens.

    The larger one of a pass of few rows, and of one of many.
    """
    generator = torch.Generator().manual_seed(0)
    batch, cache = target.cache.batch_size, target.cache
    room = cache.capacity - int(cache.seqlens.max())
    rows = min(_PROBE_ROWS, room, MOST_ROWS // batch)
    size = (batch, rows)
    tokens = torch.randint(target.model.config.vocab_size, size, generator=generator)
    tokens = tokens.to(target.device)
    expected = Runner(target.model).features(target.plan(rows), tokens).double()
    passes = (
        runner.run(target.plan(rows), tokens).features,
        runner.features(target.plan(rows), tokens),
    )
    errors = [(found.double() - expected).norm(dim=-1) / expected.norm(dim=-1) for found in passes]
    return max(one.median().item() for one in errors)
