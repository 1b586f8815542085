"""The target drafts for itself inside vLLM: chains on the tokens that verification found important.

The pass that verifies a draft is vLLM's own; our attention ranks the cached tokens in it. Drafts
follow at once, so a selection is never older than the pass before, and what vLLM does to requests
between steps (preemption, other rows, other blocks) cannot reach it.
(*Vegas*, arXiv 2602.07223, section 3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from specattn.decoding.drafting.sparse_chain import PrefixSelection
from specattn.decoding.passes.attention import Selection

from .attention import EIGHT_BITS, SpecattnAttention
from .draft_pass import DraftPass
from .selections import Selections

T = TypeVar("T")
_REFUSED = {
    "pipeline": "drafts are made where a pass ends, and other stages wait for vLLM",
    "data": "vLLM's replicas begin each pass together, and not all of them draft",
}


class SelfDrafts:
    """Greedy chains of up to `most` tokens that the target drafts on selected tokens.

    `ratio` of a request's cached tokens are selected, at least `min_tokens`. `name` says in errors
    who drafts.

    Ranks of a tensor-parallel model select by their own heads, and do what rank 0 decides
    (`agreed`): its clock alone counts.

    Raises
    ------
    ValueError
        The model is split into stages, or runs in replicas; or a layer's attention is not ours, or
        shares a cache.
    """

    def __init__(
        self, name: str, config: VllmConfig, model: Any, most: int, ratio: float, min_tokens: int
    ):
        for kind, reason in _REFUSED.items():
            if (size := getattr(config.parallel_config, f"{kind}_parallel_size")) > 1:
                raise ValueError(f"{name}: expected {kind} parallelism of 1, got {size}: {reason}")
        self.name, self.config, self.most = name, config, most
        self.ratio, self.min_tokens = ratio, min_tokens
        self.capacity = config.model_config.max_model_len
        self.ranks = config.parallel_config.tensor_parallel_size
        layers = dict[str, Attention]()
        for name, layer in get_layers_from_vllm_config(self.config, AttentionLayerBase).items():
            if not isinstance(layer, Attention):  # it keeps a state, or latents
                raise ValueError(
                    f"{self.name}: expected layers of keys and values, got {name}, which is "
                    f"{type(layer).__name__}"
                )
            layers[name] = layer
            if not isinstance(layer.impl, SpecattnAttention):
                raise ValueError(
                    f"{self.name}: expected specattn's attention in every layer, got {name} with "
                    f"{type(layer.impl).__name__}; is SPECATTN_VLLM=1 set?"
                )
            if layer.kv_sharing_target_layer_name is not None:
                raise ValueError(f"{self.name}: expected layers with their own cache, got {name}")
        self.model: Callable[..., torch.Tensor] = model
        self.compute_logits: Callable[[torch.Tensor], torch.Tensor] = model.compute_logits
        self.layers = [layer.impl for layer in layers.values() if layer.impl.window is None]
        self.selections = Selections(self.layers, ratio=self.ratio, min_tokens=self.min_tokens)
        self._weights = sum(one.nbytes for one in model.parameters())
        numbers = sum(2 * layer.num_kv_heads * layer.head_size for layer in self.layers)
        eight = self.config.cache_config.cache_dtype in EIGHT_BITS
        self._token_bytes = numbers * (1 if eight else self.config.model_config.dtype.itemsize)

    def collect(self, wanted: bool) -> None:
        """Say whether the next pass ranks the cached tokens, so that a draft may follow it."""
        self.selections.wanted = wanted

    @property
    def collects(self) -> bool:
        """Whether the next pass ranks the cached tokens."""
        return self.selections.wanted

    def agreed(self, decision: T) -> T:
        """Return what rank 0 has decided; every rank of a step asks as often."""
        found: T = get_tp_group().broadcast_object(decision)
        return found

    def drafted(
        self, rows: Sequence[int], lengths: np.ndarray, tokens: np.ndarray, steps: int, again: bool
    ) -> dict[int, list[int]]:
        """Return chains of `steps` tokens for those of `rows` that can have one now: as on rank 0.

        `lengths` [B] count the tokens of each row's request, which are in `tokens`, vLLM's table
        [B, max_model_len]. The next pass ranks the cached tokens if drafts are wanted `again`, or
        are wanted now and there are none.
        """
        ready = self._ready(rows, lengths, steps)
        decision = ready, steps, again or (bool(rows) and not ready)
        ready, steps, wanted = self.agreed(decision)
        chains = self._draft(ready, lengths, tokens, steps) if ready else []
        self.collect(wanted)
        return dict(zip(ready, chains, strict=True))

    def _ready(self, rows: Sequence[int], lengths: np.ndarray, steps: int) -> list[int]:
        """Return those of `rows` whose tokens the last pass ranked, and that have room.

        A part of a prompt is ranked otherwise.
        """
        selected = self.selections.last() if rows else None
        if selected is None:
            return []
        return [
            row
            for row in rows
            if selected.batch.rows_of(row) <= self.most + 1 and lengths[row] + steps < self.capacity
        ]

    def _draft(
        self, rows: Sequence[int], lengths: np.ndarray, tokens: np.ndarray, steps: int
    ) -> list[list[int]]:
        """Return chains of `steps` tokens for `rows` that are ready."""
        selected = self.selections.last()
        assert selected is not None
        batch, device = selected.batch, selected.counts.device
        last = torch.tensor([int(lengths[row]) - 1 for row in rows])
        seqlens = last.to(device, torch.int32)
        chosen = list(rows)
        selection = PrefixSelection(
            Selection(selected.indices[:, chosen], selected.counts[chosen]),
            batch.cache_seqlens[chosen],
        )
        (visible,) = selection.steps(seqlens, 1, self.most + 1)
        draft_pass = DraftPass(
            positions=dict(zip(self.layers, visible.indices, strict=True)),
            lengths=visible.lengths,
            cache_seqlens=seqlens,
            block_table=batch.block_table[chosen],
            steps=steps,
        )
        token = torch.tensor([int(tokens[row, lengths[row] - 1]) for row in rows]).to(device)
        position = last.to(device)
        chain = []
        for step in range(steps):
            draft_pass.step = step
            token = self._next(draft_pass, token, position + step)
            chain.append(token)
        return torch.stack(chain, 1).tolist()

    def share(self, lengths: Sequence[int]) -> float:
        """Return what a drafting pass reads of what another pass reads: weights, and the cache."""
        token = self._token_bytes
        read = [max(self.ratio * n, min(n, self.min_tokens)) for n in lengths]
        return (self._weights + token * sum(read)) / (self._weights + token * sum(lengths))

    def _next(self, draft_pass: DraftPass, token, position) -> torch.Tensor:
        """Return the most probable token behind each of some tokens [B]."""
        # Without slots vLLM writes no keys; the pass keeps its own.
        with set_forward_context(draft_pass, self.config, num_tokens=len(token), slot_mapping={}):
            hidden = self.model(input_ids=token, positions=position)
        return self.compute_logits(hidden).argmax(-1)
