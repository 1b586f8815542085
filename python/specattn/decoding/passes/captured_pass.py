"""A pass of few rows through the model's own modules, captured as a CUDA graph and replayed.

What `StaticPass` is on a CPU. A pass is captured once for its shape (requests, rows, tree or chain,
what is captured beside, what is selected) and launched again from then on in one call. Whatever
changes from pass to pass is copied to where the graph reads it: nothing else may change, which is
why lengths decide inside the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specattn.decoding.passes.attention import Pass, Selection, features_of

if TYPE_CHECKING:
    from specattn.decoding.engine.target import Target

_MOST_GRAPHS = 64


class Graph(Protocol):
    """Something that keeps the work that a function gives to a device."""

    def capture(self, run: Callable[[], None]) -> None:
        """Keep what `run` does; it may be called several times, with or without being done."""

    def replay(self) -> None:
        """Do it, on what its tensors hold now."""


class CudaGraph:
    """A CUDA graph.

    Parameters
    ----------
    pool : tuple
        Memory of graphs that are never replayed while results of others are needed.
    """

    def __init__(self, pool: Any):
        self.graph, self.pool = torch.cuda.CUDAGraph(), pool

    def capture(self, run: Callable[[], None]) -> None:
        """Keep what `run` does, after it was done once: that compiles kernels and loads them."""
        beside, stream = torch.cuda.Stream(), torch.cuda.current_stream()
        beside.wait_stream(stream)
        with torch.cuda.stream(beside):
            run()
        stream.wait_stream(beside)
        with torch.cuda.graph(self.graph, pool=self.pool):
            run()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self.graph.replay()


class CapturedPass:
    """Runs passes of few rows by replaying them.

    Parameters
    ----------
    target : Target
    graph : callable, optional
        Makes a `Graph`; by default CUDA's, on the target's device.
    """

    keeps_scores = False  # a plan brings the memory of what it captures

    def __init__(self, target: Target, graph: Callable[[], Graph] | None = None):
        self.model, self.head, self.cache = target.model, target.head, target.cache
        if graph is None:
            pool = torch.cuda.graph_pool_handle()
            graph = lambda: CudaGraph(pool)  # noqa: E731
        self._graph = graph
        self._captured: dict[tuple[Any, ...], _Captured] = {}

    def takes(self, plan: Pass) -> bool:
        """Whether a plan is one that can be captured: what it selects was chosen before."""
        return plan.selector is None or isinstance(plan.selector, Selection)

    def run(
        self, plan: Pass, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Run `tokens`, int64 [B, T], by a plan that it `takes`; returns what `StaticPass` does."""
        given = _given(plan, tokens)
        shape = (
            *((name, x.shape, x.dtype) for name, x in given.items()),
            (plan.capture, plan.max_seqlen, self.cache.storage.data_ptr()),
        )
        if (known := self._captured.get(shape)) is None:
            if len(self._captured) >= _MOST_GRAPHS:
                self._captured.clear()
            known = self._captured[shape] = _Captured(self, plan, given)
        known.take(given)
        known.graph.replay()
        for to, computed in ((plan.scores, known.plan.scores), (plan.queries, known.plan.queries)):
            if to is not None and computed is not None:
                to.copy_(computed)
        return known.logits.clone(), known.features.clone(), plan.scores


class _Captured:
    """One shape's graph, what it reads, and what it writes."""

    logits: torch.Tensor
    features: torch.Tensor

    def __init__(self, owner: CapturedPass, plan: Pass, given: dict[str, torch.Tensor]):
        self.inputs = {name: torch.empty_like(x) for name, x in given.items()}
        self.take(given)
        inputs, selector = self.inputs, None
        if isinstance(plan.selector, Selection):
            selector = Selection(inputs["indices"], inputs["lengths"])
        self.plan = replace(
            plan,
            prefix=inputs["prefix"],
            tree_mask=inputs.get("tree_mask"),
            depths=inputs.get("depths"),
            scores=None if plan.scores is None else torch.empty_like(plan.scores),
            queries=None if plan.queries is None else torch.empty_like(plan.queries),
            selector=selector,
        )
        self.graph = owner._graph()
        self.graph.capture(lambda: self._run(owner))

    def take(self, given: dict[str, torch.Tensor]) -> None:
        """Copy what changes from pass to pass to where the graph reads it."""
        for name, value in given.items():
            self.inputs[name].copy_(value)

    def _run(self, owner: CapturedPass) -> None:
        plan = replace(self.plan)  # with nothing cached that follows from its tensors
        self.features = features_of(owner.model, self.inputs["tokens"], plan)
        self.logits = owner.head(self.features)


def _given(plan: Pass, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what changes from pass to pass."""
    given = {
        "tokens": tokens,
        "prefix": plan.prefix,
        "tree_mask": plan.tree_mask,
        "depths": plan.depths,
    }
    if isinstance(plan.selector, Selection):
        given |= plan.selector._asdict()
    return {name: x for name, x in given.items() if x is not None}
