"""Chooses a target's runner: the fastest one that was seen to agree with the model's modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, get_args

import torch

from specattn.backends.select import chosen
from specattn.blocks import Unrecognised
from specattn.decoding.model.model import Model
from specattn.decoding.model.structure import Structure
from specattn.decoding.passes.cached_model import CachedModel
from specattn.decoding.passes.captured import CapturedRunner
from specattn.decoding.passes.graphs import GraphRunner
from specattn.decoding.passes.proving import BOUNDS
from specattn.decoding.passes.runner import (
    KernelRunner,
    LayerAttention,
    Runner,
    modules_of,
)

Compile = Literal["auto", "on", "off"]
"""Whether passes of few rows are replayed: where that is right, or else an error, or never."""

_PROBE_ROWS = 16
_FEW_LAYERS = 8
"""Up to which `BOUNDS` holds. Roundings of more add up like steps of a random walk: bfloat16 on
an H100, random weights, differed by 1.3e-2 behind 2 layers and by 5.6e-2 behind 32."""


def runner_of(
    target: CachedModel,
    compile: Compile,
    attention: LayerAttention,
    structure: Structure,
    *,
    compared: bool = False,
    quiet: bool = False,
) -> Runner:
    """Return what runs the passes of a target whose cache has room for a token.

    On a CPU that are kernels on the model's parts; on a GPU graphs of such, or else of its modules.
    The first time that a model is seen, random tokens run both ways and are compared: in any case
    if `compared`, for ranks that share a cache must all run the same passes. Models for which there
    is no other way decode through their own modules, as those do in whose `structure` a user has
    replaced something, and "auto" says so once, if not `quiet`. So does whoever has graphs of its
    modules alone.
    ValueError: `compile` is none of its values, or "on" where it cannot be.
    """
    if compile not in get_args(Compile):
        raise ValueError(f"compile must be one of {get_args(Compile)}, got {compile!r}")
    modules = modules_of(target.model, structure)
    storage = target.cache.storage
    if compile == "off":
        return modules
    _, backend = chosen("hybrid_tree_attention", storage.device, target.cache.dtype)
    captures = storage.is_cuda and target.cache.in_kernels
    if backend.name != "cpu" and not captures:
        if compile == "on":
            what = f"{target.cache.dtype} on {storage.device}"
            raise ValueError(f"compile='on': {what} is served by the {backend.name} backend")
        return modules
    ways = _ways(target, attention, captures)
    if not ways:  # no pass is small enough
        return modules
    reasons: list[str] = []
    for make in ways:
        try:
            if structure.replaced is not None:
                raise Unrecognised(structure.replaced)
            runner = _compared(target, make, structure, compared)
        except Unrecognised as error:
            reasons.append(str(error))
            continue
        if reasons and not quiet:
            _tell(target, f"through graphs of its own, slower modules: {reasons[0]}")
        return runner
    if compile == "on":
        raise ValueError(f"compile='on': {reasons[-1]}")
    if not quiet:
        _tell(target, f"through its own, slower modules: {reasons[-1]}")
    return modules


def _ways(
    target: CachedModel, attention: LayerAttention, captures: bool
) -> list[Callable[[], Runner]]:
    """Return what makes runners whose passes may have a row of each request, the fastest first."""
    model, batch = target.model, target.cache.batch_size
    ways: list[tuple[type[Runner], Callable[[], Runner]]] = []
    if not captures:
        ways.append((KernelRunner, lambda: KernelRunner(model, attention)))
    if captures and Model.ranks_of(model) is None and find_spec("triton"):
        ways.append((CapturedRunner, lambda: CapturedRunner(model, attention)))
    if captures:
        ways.append((GraphRunner, lambda: GraphRunner(model)))
    return [make for kind, make in ways if batch <= kind.most_rows]


def _tell(target: CachedModel, how: str) -> None:
    """Warn of how a model decodes, once."""
    words = f"{type(target.model).__name__} decodes {how}"
    kind = "told", how
    Model.of(target.model).recall(kind, lambda: warnings.warn(words, stacklevel=7))


def _compared(
    target: CachedModel, make: Callable[[], Runner], structure: Structure, anew: bool
) -> Runner:
    """Return a runner whose passes were seen to be the model's own, here and of this dtype."""
    runner, known = make(), Model.of(target.model)
    where = target.model.dtype, target.device, target.cache.stored
    kind = "replayed", runner.how, structure.number, *where
    if not anew and known.knows(("not captured", *kind)):
        raise Unrecognised(known.recall(("not captured", *kind), str))
    if anew or not known.knows(kind):
        try:
            _check(target, runner)
        except _NotCaptured as error:
            reason = str(error)
            known.recall(("not captured", *kind), lambda: reason)
            raise
        known.recall(kind, lambda: True)
    return runner


class _NotCaptured(Unrecognised):
    """A pass asks the device for something, whatever the weights are."""


def _check(target: CachedModel, runner: Runner) -> None:
    """Raise `Unrecognised` where a runner computes something else than the model's modules."""
    try:
        deeper = max(1.0, target.model.config.num_hidden_layers / _FEW_LAYERS)
        error, bound = _error(target, runner), BOUNDS[target.model.dtype] * deeper**0.5
    except Exception as reason:  # a mixture of experts asks the device, a card has too little room
        if not runner.captures or isinstance(reason, Unrecognised):
            raise
        short = isinstance(reason, torch.OutOfMemoryError)  # another time there may be more
        first = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        kind = Unrecognised if short else _NotCaptured
        raise kind(f"a pass cannot be captured: {first}") from reason
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
    rows = min(_PROBE_ROWS, room, runner.most_rows // batch)
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
