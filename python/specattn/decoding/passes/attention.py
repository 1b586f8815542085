"""`Pass`, the plan of a pass over our cache: what its layers read, collect and hand out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from specattn.blocks import TORCH, Ops
from specattn.decoding.model.latents import Latents
from specattn.decoding.model.recurrent import GatedDelta
from specattn.decoding.passes.latents import (
    EXPANDED_ROWS,
    absorbed,
    angles,
    expanded,
    latent_heads,
)
from specattn.decoding.passes.recurrent import gated_delta
from specattn.kv_cache import KVCache, NewHeads
from specattn.states import StateRows, States

if TYPE_CHECKING:
    from specattn.decoding.passes.prompts import Prompts

HEAD = -1
"""Among layers whose features are handed out: the last one's as the model's head reads it."""
NO_MASK = torch.empty(0, 0, 0, 0, dtype=torch.float32, device="cpu")
"""A mask that is passed on as it is, since it has four dimensions: so models build none."""


class Choice(NamedTuple):
    """How a pass chooses by its own scores what the next draft reads (`Ops.select`).

    `share` are names and values of the options of `specattn.select_topk`.
    """

    share: tuple[tuple[str, Any], ...]
    newer: int


@dataclass(frozen=True)
class CaptureSpec:
    """What a verification hands out beside its logits and features.

    Attributes
    ----------
    rows : tuple of int
        Rows of the tree whose attention scores over the prefix are collected, -1 the last one;
        none: no scores.
    ranking : {"logit", "weight"}
        Score by mean logit, which costs next to nothing, or by mean attention weight.
    per_row : bool
        Keep the scores of every row instead of their mean: as many times the memory.
    per_head : bool
        Keep the scores of every KV head instead of their mean: as many times the memory.
    queries : bool
        Keep the queries of every full-attention layer.
    choice : Choice, optional
        What to choose by the scores, of which there must be one for each token. Passes in graphs
        do; others leave it to who has the scores.
    """

    rows: tuple[int, ...] = ()
    ranking: str = "logit"
    per_row: bool = False
    per_head: bool = False
    queries: bool = False
    choice: Choice | None = None

    @property
    def needs_python(self) -> bool:
        """Whether it takes more than a kernel that attends and averages logits over rows."""
        return self.queries or bool(self.rows) and (self.ranking == "weight" or self.per_row)


NO_CAPTURE = CaptureSpec()


class KVSelector(Protocol):
    """Says which cached tokens a sparse pass attends to; its own new rows are always visible."""

    def select(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and their counts, as `sparse_gather_attention` takes them.

        `layer` counts full-attention layers, whose queries `q` are [B, T, Hq, D].
        """


class CapturableSelector(KVSelector):
    """A KV selector that asks the device for nothing, so that a graph may hold its choices.

    They follow from the queries, from `moving` tensors, which differ from pass to pass, and from
    what never does for the same `key`: settings, and memory that lies where it lay.
    """

    moving: Mapping[str, torch.Tensor]

    @property
    def key(self) -> Hashable:
        """What a graph depends on beside `moving`."""
        raise NotImplementedError

    def reading(self, moving: Mapping[str, torch.Tensor]) -> CapturableSelector:
        """Return the same selector of other `moving` tensors."""
        raise NotImplementedError


class Selection(NamedTuple):
    """A KV selector whose positions were chosen before the pass.

    Ascending `indices`, int32 [full layers, B, W] or [full layers, B, Hk, W], of which the first
    `lengths`, int32 [B] or [B, Hk], count, and `ahead` more.
    """

    indices: torch.Tensor
    lengths: torch.Tensor
    ahead: int = 0

    def select(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's positions, whatever its queries are."""
        return self.indices[layer], self.settled().lengths

    def extended(self, by: int | torch.Tensor) -> Selection:
        """Return the selection with `by` more positions: for every request, or int32 [B]."""
        if isinstance(by, int):
            return self._replace(ahead=self.ahead + by)
        by = by.view(-1, *[1] * (self.lengths.dim() - 1))
        return self._replace(lengths=self.lengths + by)

    def settled(self) -> Selection:
        """Return the same with all that count in `lengths`."""
        return Selection(self.indices, self.lengths + self.ahead) if self.ahead else self

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What changes from pass to pass."""
        return {"indices": self.indices, "lengths": self.settled().lengths}


@dataclass
class Pass:
    """The plan of one call of the model: new rows per request, stored behind a prefix.

    Attributes
    ----------
    windows : list of (int or None)
        Sliding window of each layer; 0: it keeps a state in place of keys.
    rows : int
        T, of each request; with `counts` the most.
    prefix : Tensor, int32 [B]
        Cached tokens that every row may see.
    max_seqlen : int
        Host-side bound: no row's position reaches it.
    tree_mask, depths : Tensor, packed; integer [T] or [B, T]
        None for a causal chain.
    scores, queries : Tensor or None
        What is captured (`Verification`), once a layer has attended.
    selector : KVSelector or None
        What full-attention layers attend to instead of the whole cache.
    counts : sequence of int, or None
        Makes rows ragged: so many of each request, causal chains side by side in one of the model.
    parents : Tensor, int64 [T] or [B, T], or None
        Of the nodes of a tree, for layers with a state.
    states : States or None
        What these layers read: of the cache, or a draft's own. `moves_states`: all rows become part
        of the text at once.
    own_layers : dict of GatedDelta or Latents
        The weights of layers that are run in place of their modules, by number.
    feature_layers : tuple of int
        What is handed out as features, side by side: the residual stream behind so many layers, or
        `HEAD`. `streams` are those that the model's modules have made, by this number.
    last_position : int or None
        Of any text: no row is placed behind it, where drafts may lie for which no text has room.
    on_layer : callable or None
        ``on_layer(n)`` is called when the pass has come to layer n.
    prompts : Prompts or None
        Attends from rows of prompts: chains of which every request has as many tokens before them.
    """

    cache: KVCache
    windows: list[int | None]
    rows: int
    prefix: torch.Tensor
    max_seqlen: int
    tree_mask: torch.Tensor | None = None
    depths: torch.Tensor | None = None
    capture: CaptureSpec = NO_CAPTURE
    scores: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    selector: KVSelector | None = None
    reuse_buffers: bool = False
    counts: Sequence[int] | None = None
    parents: torch.Tensor | None = None
    states: States | None = None
    moves_states: bool = False
    own_layers: Mapping[int, GatedDelta | Latents] = field(default_factory=dict)
    feature_layers: tuple[int, ...] = (HEAD,)
    streams: dict[int, torch.Tensor] = field(default_factory=dict)
    last_position: int | None = None
    on_layer: Callable[[int], None] | None = None
    prompts: Prompts | None = None

    @cached_property
    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the new rows go (`KVCache.slots_behind`); of ragged rows int64 [total] each."""
        if self.counts is None:
            return self.cache.slots_behind(self.prefix, self.rows)
        device = self.prefix.device
        counts = torch.tensor(self.counts, device=device)
        requests = torch.arange(len(counts), device=device)
        requests = requests.repeat_interleave(counts, output_size=sum(self.counts))
        first = (self.prefix - self.cu_seqlens[:-1])[requests]
        return requests, first + torch.arange(len(requests), device=device)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Where each request's ragged rows begin, then their number: int32 [B + 1]."""
        assert self.counts is not None
        bounds = list(accumulate(self.counts, initial=0))
        return torch.tensor(bounds, dtype=torch.int32, device=self.prefix.device)

    @property
    def positions(self) -> torch.Tensor:
        """Of the new rows in the text, int64 [B, T] or [1, total]: siblings of a tree share one."""
        if self.counts is not None:
            return self.slots[1][None]
        depths = self.depths
        found = self.slots[1] if depths is None else (self.prefix[:, None] + depths).long()
        return found if self.last_position is None else found.clamp_max(self.last_position)

    def handed_out(self, read: torch.Tensor) -> torch.Tensor:
        """Return the features of the pass, given what the model's head reads."""
        found = [read if n == HEAD else self.streams[n] for n in self.feature_layers]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def has_window(self, layer: int, window: int | None) -> bool:
        """Whether the pass attends in a layer as a model's sliding window wants it."""
        planned = self.windows[layer] or self.cache.capacity
        return window is None or min(window, self.cache.capacity) == planned

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Store the new keys and values of a layer and attend: [B, T, heads, D] or [1, total, ..].

        `options` are ``softmax_scale``, ``softcap`` and ``sinks`` of the primitives.
        """
        self._reached(layer)
        return self._attend(layer, q, k, v, **options)

    def attend_latents(
        self, ops: Ops, layer: int, weights: Latents, heads: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Store the new rows of a layer with latents and attend: [B, T, Hq, Dv].

        `heads` are its queries and rows (`latent_heads`). Of many rows, keys and values of heads
        are made of the latents, where nothing else is asked of the pass.
        """
        self._reached(layer)
        if self.rows >= EXPANDED_ROWS and self.selector is None and self.capture == NO_CAPTURE:
            return self._attend_expanded(ops, layer, weights, *heads)
        scale = weights.scaling
        return absorbed(
            ops, weights, heads, lambda *new: self._attend(layer, *new, softmax_scale=scale)
        )

    def _reached(self, layer: int) -> None:
        if self.on_layer is not None:
            self.on_layer(layer)

    def _attend_expanded(
        self, ops: Ops, layer: int, weights: Latents, q: torch.Tensor, row: torch.Tensor
    ) -> torch.Tensor:
        cache, ragged = self.cache, self.counts is not None
        new = row[0] if ragged else row
        cache.write(layer, new, new, self.slots)
        options: dict[str, Any] = {"cache_seqlens": self.prefix, "tree_mask": self.tree_mask}
        if ragged:
            options |= {"cu_seqlens_q": self.cu_seqlens, "max_seqlen_q": self.rows}
        stored = cache.storage[cache.place(layer), 0, :, : self.max_seqlen, 0]
        rows = cache.numbers(stored)
        out = expanded(ops, weights, q[0] if ragged else q, rows, **options)
        return out[None] if ragged else out

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        cache, window = self.cache, self.windows[layer]
        if self.prompts is not None:
            rows = (q, k, v) if self.counts is None else (q[0], k[0], v[0])
            new = NewHeads(layer, *rows, self)
            out = self.prompts.attend(cache, new, self.counts, window, **options)
            if out is not None:
                return out if self.counts is None else out[None]
        if self.counts is not None:
            new = NewHeads(layer, q[0], k[0], v[0], self)
            options |= {"cu_seqlens_q": self.cu_seqlens, "max_seqlen_q": self.rows}
            return cache.attend(new, window=window, **options)[0][None]
        new = NewHeads(layer, q, k, v, self)
        if window is not None:
            return cache.attend(new, window=window, **options)[0]
        full_layer = self.windows[:layer].count(None)
        if self.selector is not None:
            return cache.attend_selected(new, *self.selector.select(full_layer, q), **options)[0]
        if self.capture.queries:
            if self.queries is None:
                self.queries = q.new_empty(self.windows.count(None), *q.shape)
            self.queries[full_layer] = q
        if not self.capture.rows:
            return cache.attend(new, **options)[0]
        if self.scores is None:
            self.scores = self._score_memory()
        return self._attend_and_score(new, self.scores[full_layer], options)

    def chosen(
        self, ops: Ops, scores: torch.Tensor | None, prefix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Choose by the scores of the pass what the next draft reads, if it is to."""
        if scores is None or (choice := self.capture.choice) is None:
            return None
        return ops.select(scores, prefix, choice.newer, **dict(choice.share))

    def recall(self, layer: int, parents: torch.Tensor | None = None) -> StateRows:
        """Return the state of a layer that keeps one, and room for what the pass leaves.

        `parents` of the tree's nodes, if they lie somewhere else in this pass.
        """
        assert self.states is not None
        self._reached(layer)
        place = self.cache.place(layer)
        if self.moves_states:
            return self.states.moving(place, self.counts)
        return self.states.rows(place, self.rows, self.parents if parents is None else parents)

    def run_layer(self, module: Any, hidden: torch.Tensor, options: dict[str, Any]) -> Any:
        """Run a layer in place of its module with such `options`; return what that would."""
        layer: int = module.layer_idx
        weights = self.own_layers[layer]
        if isinstance(weights, GatedDelta):
            out = gated_delta(TORCH, weights, hidden, self.recall(layer))
            return TORCH.linear(out, weights.out)
        heads = latent_heads(TORCH, weights, hidden, angles(options["position_embeddings"]))
        out = self.attend_latents(TORCH, layer, weights, heads)
        return TORCH.linear(out.flatten(2), weights.out), None

    def _score_memory(self) -> torch.Tensor:
        """Return room for the scores of all full-attention layers."""
        storage, capture = self.cache.storage, self.capture
        size = [self.windows.count(None), self.cache.batch_size]
        size += [len(capture.rows)] * capture.per_row + [storage.shape[-2]] * capture.per_head
        dtype = torch.promote_types(self.cache.dtype, torch.float32)
        return storage.new_empty(*size, self.cache.width, dtype=dtype)

    def _attend_and_score(
        self, new: NewHeads, scores: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attend and write one layer's scores, averaged over heads, or over those of a group."""
        options["collect_rows"] = self.capture.rows
        by_weight, per_row = self.capture.ranking == "weight", self.capture.per_row
        if not by_weight and not per_row:
            options |= {"per_head": self.capture.per_head, "collected": scores}
            return self.cache.attend_and_collect(new, collect="scores", **options)[0]
        out, lse, logits = self.cache.attend_and_collect(new, collect="logits", **options)
        ranks = logits.float()  # [B, rows, Hq, N]
        if by_weight:
            own = torch.stack([lse[:, row] for row in self.capture.rows], 1)  # no index to copy
            ranks = (ranks - own[..., None]).exp()
        groups = self.cache.storage.shape[-2] if self.capture.per_head else 1
        means = ranks.unflatten(2, (groups, -1)).mean(3)  # [B, rows, groups, N]
        means = means if self.capture.per_head else means.squeeze(2)
        unseen = (logits[:, :, :1] if self.capture.per_head else logits[:, :, 0]) == -torch.inf
        if not per_row:
            means, unseen = means.mean(1), unseen[:, 0]
        scores.copy_(means.masked_fill(unseen, -torch.inf))
        return out
