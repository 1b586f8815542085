"""Runs passes of few rows as CUDA graphs of our kernels, on a model's parts, in few shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.blocks import Graph, Ops, Replayed, captured
from specattn.decoding.passes.attention import Pass, Selection
from specattn.decoding.passes.padding import padded_pass
from specattn.decoding.passes.runner import KernelRunner, LayerAttention, Runner, Verification


class CapturedRunner(KernelRunner):
    """Runs passes of few rows as CUDA graphs of kernels; `graphs` as for `captured`.

    Between kernels nothing asks the device: a layer whose module does so, such as some mixtures of
    experts, cannot be captured, and a KV selector that asks for queries takes the model's modules.
    """

    how = "computed from its parts in graphs"
    captures = True
    most_rows = 512  # beyond those of the products' kernel torch's are in the same graph
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
        return captured(self._graphs, self._eager())

    def _eager(self) -> Ops:
        from specattn.blocks.fused import Fused  # needs triton

        return Fused()

    def run(self, plan: Pass, tokens: torch.Tensor) -> Verification:
        """Run a pass; those of as many rows share a graph, whatever their trees (`padding`)."""
        if tokens.numel() > self.most_rows or self.attention.in_python(plan):
            return Runner.run(self, plan, tokens)
        real = slice(plan.rows)
        try:
            logits, features, *kept = super().run(*padded_pass(plan, tokens))
        except Exception as reason:
            if not (len(self._passes) and type(reason).__module__.startswith("triton.")):
                raise
            # Kernels of more rows need more of a multiprocessor's memory.
            self.most_rows = tokens.numel() - 1
            warnings.warn(
                f"passes of {tokens.numel()} rows and more run through the model's own, slower "
                f"modules: {reason}",
                stacklevel=2,
            )
            return Runner.run(self, plan, tokens)
        return Verification(logits[:, real], features[:, real], *kept)

    def _pass(self, how: Any, ops: Ops, tokens: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Run the decoder by a plan of what changes, since steps in Python are captured, too."""
        selected = {name: inputs[name] for name in Selection._fields if name in inputs}
        moving: Any = {"selector": Selection(**selected) if selected else None}
        moving |= {name: inputs.get(name) for name in ("prefix", "depths", "parents")}
        moving["tree_mask"] = inputs.get("mask within None")
        self._plan = own = replace(self._plan, scores=None, queries=None, streams={}, **moving)
        logits, features, scores, _ = super()._pass(how, ops, tokens, **inputs)
        return logits, features, own.scores if scores is None else scores, own.queries
