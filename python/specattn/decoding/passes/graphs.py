"""Runs passes of few rows as CUDA graphs of the model's modules, in few shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.blocks import Graph, Ops, captured
from specattn.decoding.model.model import Model
from specattn.decoding.passes.attention import Pass, Selection
from specattn.decoding.passes.interface import read_by_head
from specattn.decoding.passes.padding import ROWS, captured_rows, fitted
from specattn.decoding.passes.runner import Runner, Verification


class GraphRunner(Runner):
    """Runs passes of few rows as CUDA graphs of the model's modules; `graphs` as for `captured`."""

    how = "replayed"
    captures = True
    most_rows = ROWS[-1]

    def __init__(
        self, model: PreTrainedModel, graphs: Callable[[], Callable[[], Graph]] | None = None
    ):
        super().__init__(model)
        self._passes = captured(graphs)
        if Model.ranks_of(model) is None:
            self.programs = self._passes.beside()

    def run(self, plan: Pass, tokens: torch.Tensor) -> Verification:
        """Run a pass; one whose KV selector asks for queries takes the model's modules.

        Passes of as many rows share a graph, whatever their trees, and those of a few more rows do,
        too (`padding`), where nothing is captured of them.
        """
        selected = isinstance(plan.selector, Selection)
        if tokens.numel() > self.most_rows or not (plan.selector is None or selected):
            return super().run(plan, tokens)
        asked, key = (len(tokens), plan.rows), self._key(plan)
        plan, tokens, size = fitted(self._passes, key, plan, tokens)
        inputs = {"tokens": tokens, "prefix": plan.prefix}
        moving = {name: getattr(plan, name) for name in ("tree_mask", "depths", "parents")}
        if plan.states is None:
            del moving["parents"]
        inputs |= {name: x for name, x in moving.items() if x is not None}
        if isinstance(plan.selector, Selection):
            inputs |= plan.selector.inputs
        program = partial(self._pass, plan)
        found = self._passes.run_as(size, key, program, inputs)
        return self._handed_out(plan, *found).of_first(*asked)

    def captured_rows(self, plan: Pass) -> int | None:
        """Return how many rows the graph has that would run such a pass, if there is one."""
        return captured_rows(self._passes, self._key(plan), plan)

    def _key(self, plan: Pass) -> Any:
        """Return what passes differ by beside their shapes."""
        selector, own_states = plan.selector, plan.states is plan.cache.states
        listed = selector.indices.shape[2:] if isinstance(selector, Selection) else None
        key = plan.capture, plan.max_seqlen, plan.cache.storage.data_ptr(), own_states
        return *key, plan.feature_layers, listed

    def _pass(
        self,
        plan: Pass,
        ops: Ops,
        tokens: torch.Tensor,
        prefix: torch.Tensor,
        tree_mask: torch.Tensor | None = None,
        depths: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        **selected: Any,
    ) -> tuple[Any, ...]:
        selector = Selection(**selected) if selected else None
        moving: Any = {"prefix": prefix, "tree_mask": tree_mask, "depths": depths}
        moving["parents"] = parents
        own = replace(plan, selector=selector, scores=None, queries=None, streams={}, **moving)
        read = read_by_head(self.model, tokens, own)
        logits = self.model.get_output_embeddings()(read)
        chosen = own.chosen(ops, own.scores, prefix)
        return logits, own.handed_out(read), own.scores, own.queries, chosen
