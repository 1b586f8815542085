"""Runs passes of few rows as CUDA graphs of our kernels, on a model's parts, in few shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.blocks import Drawing, Graph, Ops, Replayed, captured
from specattn.call_forms import NotServed
from specattn.decoding.model.families import transform_logits
from specattn.decoding.model.model import Model
from specattn.decoding.passes.attention import CapturableSelector, Pass, Selection
from specattn.decoding.passes.padding import ROWS, captured_rows, fitted
from specattn.decoding.passes.runner import (
    PLAIN,
    KernelRunner,
    LayerAttention,
    Runner,
    Verification,
)

_PLAIN = 160
"""Rows that a pass is longer by where it takes twice as long as of one."""

_SELECTING = "selecting by "
"""What inputs of a pass begin with that its selector reads."""


def _fused() -> Ops:
    from specattn.blocks.fused import Fused  # needs triton

    return Fused()


def _moving(selectors: Sequence[Any], together: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return what passes' selectors read, if graphs may hold them, as inputs."""
    if not isinstance(selectors[0], CapturableSelector):
        return {}
    names = selectors[0].moving
    return {_SELECTING + name: together([one.moving[name] for one in selectors]) for name in names}


class CapturedRunner(KernelRunner):
    """Runs passes of few rows as CUDA graphs of kernels; `graphs` as for `captured`.

    Between kernels nothing asks the device: a layer whose module does so, such as some mixtures of
    experts, cannot be captured, and a KV selector that may ask it takes the model's modules.
    """

    how = "computed from its parts in graphs"
    captures = True
    most_rows = ROWS[-1]  # beyond those of the products' kernel torch's are in the same graph
    _trims_masks = False  # kernels trim them

    def __init__(
        self,
        model: PreTrainedModel,
        attention: LayerAttention,
        graphs: Callable[[], Callable[[], Graph]] | None = None,
    ):
        self._graphs = graphs
        super().__init__(model, attention)

    def _programs(self) -> Replayed:
        return captured(self._graphs, _fused)

    def _eager(self) -> Ops:
        return _fused()

    def run(self, plan: Pass, tokens: torch.Tensor) -> Verification:
        """Run a pass; those of as many rows share a graph, whatever their trees (`padding`)."""
        if tokens.numel() > self.most_rows or self._may_ask(plan):
            return Runner.run(self, plan, tokens)
        key = self._key(plan)
        try:
            found = self._replay(key, *fitted(self._passes, key, plan, tokens))
        except Exception as reason:
            theirs = type(reason).__module__.startswith("triton.")
            if not (len(self._passes) and (theirs or isinstance(reason, NotServed))):
                raise
            # Kernels of more rows need more of a multiprocessor's memory, or were compiled wrong.
            self.most_rows = tokens.numel() - 1
            words = (
                f"passes of {tokens.numel()} rows and more run through the model's own, slower "
                f"modules: {reason}"
            )
            told = "told", words  # once for all runs of the model
            Model.of(self.model).recall(told, lambda: warnings.warn(words, stacklevel=4))
            return Runner.run(self, plan, tokens)
        return found.of_first(len(tokens), plan.rows)

    def captured_rows(self, plan: Pass) -> int | None:
        """Return how many rows the graph has that would run such a pass, if there is one."""
        return captured_rows(self._passes, self._key(plan), plan)

    def _may_ask(self, plan: Pass) -> bool:
        """Whether layers choose what they read in a way that no graph can hold."""
        plain = type(self.attention) is LayerAttention and self.attention.cache.latent is None
        held = plain and isinstance(plan.selector, CapturableSelector)
        return self.attention.in_python(plan) and not held

    def _key(self, plan: Pass) -> Any:
        selector: Any = plan.selector
        listed = selector.indices.shape[2:] if isinstance(selector, Selection) else None
        return super()._key(plan), listed, getattr(selector, "key", None)

    def _inputs(self, plan: Pass, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return super()._inputs(plan, tokens) | _moving([plan.selector], lambda one: one[0])

    def chain(
        self,
        plans: Sequence[Pass],
        root: torch.Tensor,
        drawing: Callable[[], Drawing | None],
        steps: int,
    ) -> torch.Tensor | None:
        """Return what the first `steps` passes of one row each draft, in one graph.

        One of more of these passes serves, where it is kept; of more there is none.

        All but the selector is the first one's: each of the others lies a token behind it.
        Layers with a state, latents and selectors that may ask are left to passes one by one.
        """
        first, cache = plans[0], self.attention.cache
        apart = first.states is not None or cache.latent is not None
        apart = apart or type(self.attention) is not LayerAttention or len(root) > self.most_rows
        chosen = [plan.selector for plan in plans if isinstance(plan.selector, Selection)]
        alike = all(
            one.indices is chosen[0].indices
            and one.lengths is chosen[0].lengths
            and one.ahead == chosen[0].ahead + step
            for step, one in enumerate(chosen)
        )
        apart = apart or not alike or len(chosen) not in (0, len(plans))
        alike = len({self._key(plan) for plan in plans}) == 1
        if apart or not alike or any(map(self._may_ask, plans)) or (how := drawing()) is None:
            return None
        # What selectors read may lie by request or not.
        batch = None if isinstance(first.selector, CapturableSelector) else len(root)
        given: Any = first.max_seqlen, first.feature_layers, how.key, self._key(first)
        key = ("chain", *given, len(root) if batch is None else None)
        rows = range(0, _PLAIN * (len(plans) + 1), _PLAIN)
        deep = self._passes.depth_for(key, steps, rows, batch)
        inputs = how.inputs | {"tokens": root[:, None], "prefix": first.prefix}
        if chosen:
            inputs |= chosen[0].inputs
        inputs |= _moving([plan.selector for plan in plans[:deep]], torch.stack)
        layers = PLAIN._replace(in_python=self.attention.in_python(first))
        program = partial(self._chain, how, layers, deep)
        with self._planned(first):
            found: torch.Tensor = self._passes.run((key, deep), program, inputs, batch)
        return found[:, : steps + 1].clone()

    def _chain(
        self,
        how: Drawing,
        layers: Any,
        steps: int,
        ops: Ops,
        tokens: torch.Tensor,
        prefix: torch.Tensor,
        **given: torch.Tensor,
    ) -> torch.Tensor:
        """Draft so many steps behind `tokens` [B, 1], which lie behind a prefix [B]."""
        chain, how = [tokens], how.of(given)
        for step in range(steps):
            inputs = {"prefix": prefix + step if step else prefix}
            if "indices" in given:
                selection = Selection(given["indices"], given["lengths"], step)
                inputs |= selection.inputs
            inputs |= {name: x[step] for name, x in given.items() if name.startswith(_SELECTING)}
            logits, *_ = self._pass(layers, ops, chain[-1], **inputs)
            if self._transforms:
                logits = transform_logits(self.model.config, logits)
            chain.append(ops.draw(logits, step, how))
        return torch.cat(chain, 1)

    def _pass(self, how: Any, ops: Ops, tokens: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Run the decoder by a plan of what changes, since steps in Python are captured, too."""
        selected: Any = {name: inputs[name] for name in ("indices", "lengths") if name in inputs}
        moving: Any = {"selector": Selection(**selected) if selected else None}
        if isinstance(self._plan.selector, CapturableSelector):
            own_names = {name: inputs[_SELECTING + name] for name in self._plan.selector.moving}
            moving["selector"] = self._plan.selector.reading(own_names)
        moving |= {name: inputs.get(name) for name in ("prefix", "depths", "parents")}
        moving["tree_mask"] = inputs.get("mask within None")
        self._plan = own = replace(self._plan, scores=None, queries=None, streams={}, **moving)
        logits, features, scores, _ = super()._pass(how, ops, tokens, **inputs)
        scores = own.scores if scores is None else scores
        return logits, features, scores, own.queries, own.chosen(ops, scores, inputs["prefix"])
