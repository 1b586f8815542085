"""Vegas as a drafter of vLLM: the target drafts on the tokens that verification found important.

The pass that verifies a draft is vLLM's own; our attention ranks the cached tokens in it. Drafts
follow at once, so a selection is never older than the pass before, and what vLLM does to requests
between steps (preemption, other rows, other blocks) cannot reach it.
(*Vegas*, arXiv 2602.07223, section 3; docs/vllm.md)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from specattn.decoding.drafting.gains import NONE, ChainGains, Effort
from specattn.decoding.drafting.pace import Arm, FixedSize
from specattn.decoding.drafting.sparse_chain import PrefixSelection
from specattn.decoding.drafting.timings import Memory
from specattn.decoding.model.model import Model
from specattn.decoding.passes.attention import Selection
from specattn.decoding.text.statistics import Clock

from .attention import SpecattnAttention
from .draft_pass import DraftPass
from .selections import Selected, Selections


class Vegas:
    """Self-drafting for vLLM's ``"method": "custom_class"``; a subclass may change its options.

    Drafts are greedy, and vLLM's rejection sampler takes a draft without probabilities for a
    certain one: texts keep the target's distribution at every temperature.

    Parameters
    ----------
    vllm_config : VllmConfig
        Of its `speculative_config`: `num_speculative_tokens`, drafted per round.

    Attributes
    ----------
    ratio : float
        Share of a request's tokens that a draft reads.
    min_tokens : int
        Fewest that it reads.
    switch : bool
        Time steps with and without drafts and keep to the faster kind, for all requests alike: they
        share each step.

    Raises
    ------
    ValueError
        The model is split over processes.
    """

    ratio = 0.07
    min_tokens = 256
    switch = True

    def __init__(self, vllm_config: VllmConfig):
        if vllm_config.parallel_config.world_size > 1:
            raise ValueError(
                "Vegas: expected a model in one process, got a world size of "
                f"{vllm_config.parallel_config.world_size}"
            )
        self.config = vllm_config
        self.gamma = vllm_config.speculative_config.num_speculative_tokens
        self.capacity = vllm_config.model_config.max_model_len
        self.lengths: list[int] = []  # of the requests that got a token in the last step
        self.drafted = 0  # requests that had a draft in it
        effort = Effort(1, self.gamma)
        self.arm = FixedSize(effort)
        if self.switch:
            clock = Clock(vllm_config.device_config.device)
            memory = Memory(clock, lambda: self.lengths, Model())
            self.arm = Arm(memory, "vegas", [NONE, effort], [1, self.gamma + 1], ChainGains)

    def load_model(self, model: Any) -> None:
        """Set the target; ValueError where a layer's attention is not ours, or shares a cache."""
        layers = get_layers_from_vllm_config(self.config, Attention)
        for name, layer in layers.items():
            if not isinstance(layer.impl, SpecattnAttention):
                raise ValueError(
                    f"Vegas: expected specattn's attention in every layer, got {name} with "
                    f"{type(layer.impl).__name__}; is SPECATTN_VLLM=1 set?"
                )
            if layer.kv_sharing_target_layer_name is not None:
                raise ValueError(f"Vegas: expected layers with their own cache, got {name}")
        self.model: Callable[..., torch.Tensor] = model
        self.compute_logits: Callable[[torch.Tensor], torch.Tensor] = model.compute_logits
        self.layers = [layer.impl for layer in layers.values() if layer.impl.window is None]
        self.selections = Selections(self.layers, ratio=self.ratio, min_tokens=self.min_tokens)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each row that gets one, and decide whether the next pass collects.

        A request's first round has no draft: nothing was selected for it yet.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        effort = self._chosen(rows, sampled_token_ids, num_tokens_no_spec) if rows else NONE
        # It is chosen for the draft that is made now, and so for the next collection.
        selected, self.selections.wanted = self.selections.last(), effort != NONE
        ready = list[int]()
        if selected is not None and effort != NONE:
            ready = [
                row
                for row in rows
                if selected.batch.rows_of(row) <= self.gamma + 1  # a prompt's part chose otherwise
                and num_tokens_no_spec[row] + self.gamma < self.capacity
            ]
        if selected is not None and ready:
            chains = self._draft(ready, selected, num_tokens_no_spec, token_ids_cpu)
            for row, chain in zip(ready, chains.tolist(), strict=True):
                drafts[row] = chain
        self.drafted = len(ready)
        if rows and (effort != NONE) == bool(ready):  # or else the step prepares the next draft
            self.arm.begin(effort, 1 + effort.depth)
        return drafts

    def _chosen(self, rows: list[int], sampled: list[list[int]], lengths: np.ndarray) -> Effort:
        """Learn from the step that has ended; return what is drafted for the next one."""
        self.lengths = [int(lengths[row]) for row in rows]
        # Rows without a draft accepted nothing, so they are among the last.
        counts = sorted((len(sampled[row]) - 1 for row in rows), reverse=True)
        self.arm.learn(self.gamma if self.drafted else 0, counts[: self.drafted])
        return self.arm.choose(self.gamma)

    def _draft(
        self, rows: list[int], selected: Selected, lengths: np.ndarray, tokens: np.ndarray
    ) -> torch.Tensor:
        """Return the chains of some rows, [rows, gamma], by passes over what was selected."""
        batch, device = selected.batch, selected.counts.device
        last = torch.tensor([int(lengths[row]) - 1 for row in rows])
        seqlens = last.to(device, torch.int32)
        selection = PrefixSelection(
            Selection(selected.indices[:, rows], selected.counts[rows]), batch.cache_seqlens[rows]
        )
        (visible,) = selection.steps(seqlens, 1, self.gamma + 1)
        draft_pass = DraftPass(
            positions=dict(zip(self.layers, visible.indices, strict=True)),
            lengths=visible.lengths,
            cache_seqlens=seqlens,
            block_table=batch.block_table[rows],
            steps=self.gamma,
        )
        token = torch.tensor([int(tokens[row, lengths[row] - 1]) for row in rows]).to(device)
        position = last.to(device)
        chain = []
        for step in range(self.gamma):
            draft_pass.step = step
            token = self._next(draft_pass, token, position + step)
            chain.append(token)
        return torch.stack(chain, 1)

    def _next(self, draft_pass: DraftPass, token, position) -> torch.Tensor:
        """Return the most probable token behind each of some tokens [B]."""
        # Without slots vLLM writes no keys; the pass keeps its own.
        with set_forward_context(draft_pass, self.config, num_tokens=len(token), slot_mapping={}):
            hidden = self.model(input_ids=token, positions=position)
        return self.compute_logits(hidden).argmax(-1)
