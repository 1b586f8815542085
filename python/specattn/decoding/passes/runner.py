"""Ways to run a pass of a model over a KV cache: by its modules, and by kernels on its parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import torch
from transformers import PreTrainedModel

from specattn.blocks import (
    Direct,
    Drawing,
    Ops,
    Place,
    Programs,
    Replayed,
    Rotated,
    Size,
    Store,
    angle_tables,
    recorded,
)
from specattn.decoding.model.families import transform_logits, transforms_logits
from specattn.decoding.model.latents import Latents
from specattn.decoding.model.parts import Attention, Parts, parts_of
from specattn.decoding.model.structure import Structure
from specattn.decoding.passes.attention import HEAD, Pass, Selection
from specattn.decoding.passes.decoder import Streams, decoder, features, rotated
from specattn.decoding.passes.interface import attach, read_by_head, read_in_call
from specattn.decoding.passes.latents import absorbed, latent_heads
from specattn.kv_cache import KVCache
from specattn.ops._tree_mask import packed_mask
from specattn.states import StateRows

MOST_ROWS = 128
"""Rows of a replayed pass on a CPU; other products are better for more."""
MOST_ROWS_OF_16_BITS = 256
"""The same where a processor multiplies 16 bits slowly: there torch takes 3 to 4 times as long."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values of new rows, each [B, T, heads, D]."""


class Verification(NamedTuple):
    """What a pass hands out.

    Attributes
    ----------
    logits : Tensor [B, T, V]
    features : Tensor [B, T, H * layers]
        What `CachedModel.feature_layers` says; by default what the head of the model reads, the
        last layer's output, normalised.
    scores : Tensor, float32 [full layers, B, N], or None
        Mean over the captured rows and all heads; -inf beyond the prefix. With
        `CaptureSpec.per_row` the mean over the heads of every row, [full layers, B, rows, N]; with
        `CaptureSpec.per_head` over the heads of every KV head, [..., Hk, N]. In float64 of a
        float64 model.
    queries : Tensor [full layers, B, T, Hq, D], or None
    selection : Selection, or None
        What `CaptureSpec.choice` asks for, if the pass has chosen.
    """

    logits: torch.Tensor
    features: torch.Tensor
    scores: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    selection: Selection | None = None

    def of_first(self, batch: int, rows: int) -> Verification:
        """Return what it hands out of the first requests, and of their first rows."""
        logits, features, scores, queries, selection = self
        logits, features = logits[:batch, :rows], features[:batch, :rows]
        if len(self.logits) > batch:  # where these are captured no row is added
            scores = None if scores is None else scores[:, :batch]
            queries = None if queries is None else queries[:, :batch]
        if selection is not None:
            indices, lengths, ahead = selection
            selection = Selection(indices[:, :batch], lengths[:batch], ahead)
        return Verification(logits, features, scores, queries, selection)


class Runner:
    """Runs passes through the model's own modules: any number of rows, on any device.

    `programs` is how drafters beside the model should run theirs; `most_rows` are those of a pass
    that is replayed, all requests together. One that `captures` has graphs, each of which takes
    longer to make than many passes. A runner may be kept with what is
    remembered of its model, so it does not keep the model.
    """

    how: ClassVar[str] = "through its own modules"
    programs: Programs = Direct()
    captures: ClassVar[bool] = False
    most_rows: int = MOST_ROWS

    def __init__(self, model: PreTrainedModel):
        self._model = ref(model)
        self._transforms = transforms_logits(model.config)

    @property
    def model(self) -> PreTrainedModel:
        """The model whose passes it runs."""
        model = self._model()
        assert model is not None, "who runs passes keeps the model"
        return model

    def run(self, plan: Pass, tokens: torch.Tensor) -> Verification:
        """Run `tokens`, int64 [B, T], by a plan. Scores hold until the next pass."""
        read = self._read(plan, tokens)
        features = plan.handed_out(read)
        return Verification(self.logits_of(read), features, plan.scores, plan.queries)

    def chain(
        self,
        plans: Sequence[Pass],
        root: torch.Tensor,
        drawing: Callable[[], Drawing | None],
        steps: int,
    ) -> torch.Tensor | None:
        """Return the chains that passes of one row each draft, as `CachedModel.draft_chain` says.

        None, by default: step by step they are drafted as fast.
        """
        return None

    def captured_rows(self, plan: Pass) -> int | None:
        """Return how many rows, all requests together, the graph has that would run such a pass.

        None: it would be captured, or there are no graphs.
        """
        return None

    def features(self, plan: Pass, tokens: torch.Tensor) -> torch.Tensor:
        """Return the features [B, T, H * layers] of a pass."""
        return plan.handed_out(self._read(plan, tokens))

    def _read(self, plan: Pass, tokens: torch.Tensor) -> torch.Tensor:
        attach(self.model)  # again: the implementation may have been set to another one meanwhile
        return read_by_head(self.model, tokens, plan)

    def logits_of(self, read: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] that the model makes of what its head reads, [..., H]."""
        return transform_logits(self.model.config, self.model.get_output_embeddings()(read))

    def _handed_out(
        self,
        plan: Pass,
        logits: torch.Tensor,
        features: torch.Tensor,
        scores: torch.Tensor | None,
        queries: torch.Tensor | None,
        chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Verification:
        """Return what was computed where the next pass computes too."""
        if not plan.reuse_buffers:
            logits, features = logits.clone(), features.clone()
        if self._transforms:
            logits = transform_logits(self.model.config, logits)
        selection = None
        if chosen is not None:  # it is for passes that compute there
            indices, lengths = chosen
            selection = Selection(indices.clone(), lengths.clone())
        return Verification(logits, features, scores, queries, selection)


class CallingRunner(Runner):
    """Runs passes by calls of the model itself, whose hooks or ``forward`` are a user's."""

    how = "through calls of the model itself"

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        keeps = "logits_to_keep" in signature(type(model).forward).parameters
        self._last: dict[str, Any] = {"logits_to_keep": 1} if keeps else {}

    def run(self, plan: Pass, tokens: torch.Tensor) -> Verification:
        """Run a pass; its logits are what the call returns."""
        attach(self.model)
        logits, read = read_in_call(self.model, tokens, plan)
        return Verification(logits, plan.handed_out(read), plan.scores, plan.queries)

    def _read(self, plan: Pass, tokens: torch.Tensor) -> torch.Tensor:
        attach(self.model)
        return read_in_call(self.model, tokens, plan, **self._last)[1]


def modules_of(model: PreTrainedModel, structure: Structure) -> Runner:
    """Return what runs passes through the modules of a model of this structure."""
    return CallingRunner(model) if structure.at_top else Runner(model)


class LayerAttention:
    """How the layers of a recorded pass attend to the cache: here, to one that is whole.

    `longest` as for `CachedModel`.
    """

    def __init__(self, cache: KVCache, windows: list[int | None], longest: int):
        self.cache, self.windows, self.longest = cache, windows, longest

    def key(self, plan: Pass) -> Any:
        """Return what recordings differ by beside their inputs: nothing."""
        return None

    def inputs(self, plan: Pass) -> dict[str, torch.Tensor]:
        """Return what changes from pass to pass beside what every pass has."""
        given = plan.selector.inputs if isinstance(plan.selector, Selection) else {}
        if self.cache.latent is not None:
            given["places"] = self.cache.places(plan.slots)
        return given

    def in_python(self, plan: Pass) -> bool:
        """Whether full-attention layers must attend in Python."""
        return not (plan.selector is None or isinstance(plan.selector, Selection))

    def store(self, n: int, count: int, chain: bool) -> Store | None:
        """Return where layer n stores the heads of `count` rows as it rotates them, if it does."""
        return store_of(self.cache, n)

    def attend(
        self,
        ops: Any,
        n: int,
        heads: Heads,
        inputs: dict[str, torch.Tensor],
        collected: Collected | None,
        **options: Any,
    ) -> torch.Tensor:
        """Return the outputs of layer n; latents are only now stored.

        `heads` are queries, keys and values, each [B, T, heads, D]; `inputs` are the pass's,
        `options` scale, softcap and sinks, window, tree mask and depths.
        """
        q, k, v = heads
        k_cache, v_cache = self.cache.layer(n)
        scales = self.cache.scales(n)
        if self.cache.latent is not None:
            ops.write_rows(k, k_cache, inputs["places"], scales.get("k_scale"))
        options |= scales
        window = options["window"]
        if window is None and "indices" in inputs:
            for name in ("window", "tree_mask", "depths"):
                options.pop(name)
            selected = inputs["indices"][self.windows[:n].count(None)], inputs["lengths"]
            return ops.sparse_gather_attention(q, k_cache, v_cache, *selected, k, v, **options)
        read: Any = (q, k_cache, v_cache, inputs["prefix"], None, None)
        if collected is not None:
            rows, scores = collected
            return ops.verify_attention(*read, rows=rows, scores=scores, **options)
        return ops.hybrid_tree_attention(*read, **options)


def store_of(cache: KVCache, layer: int, slot: int | None = None) -> Store:
    """Return where a layer's keys and values lie, and their scales; written from `slot` on."""
    scales: Any = tuple(cache.scales(layer).values()) or (None, None)
    return Store(cache.layer(layer), slot, scales)


class Collected(NamedTuple):
    """What a verification collects in a layer: of which rows, and where."""

    rows: tuple[int, ...]
    scores: torch.Tensor


class _How(NamedTuple):
    """How a pass attends: its full layers in Python, or by a kernel that collects some rows."""

    in_python: bool
    rows: tuple[int, ...]
    per_head: bool


PLAIN = _How(in_python=False, rows=(), per_head=False)


class KernelRunner(Runner):
    """Runs passes of few rows as recorded kernel calls, on a CPU.

    With few rows, Python and products that read weights slowly take most of a pass. Between kernels
    there may be steps in Python: a mixture of experts, or a KV selector that needs the queries of a
    layer. A model whose parts are not recognised raises `Unrecognised`.
    """

    how = "computed from its parts"
    _trims_masks = True  # to each window, before a pass

    def __init__(self, model: PreTrainedModel, attention: LayerAttention):
        super().__init__(model)
        self.attention, self.parts = attention, parts_of(model)
        self.windows = attention.windows
        capacity = attention.cache.capacity
        self._angles = _angles(self.parts, attention)
        self._has_latents = attention.cache.latent is not None
        self._least_window = min(filter(None, self.windows), default=capacity)
        self._distinct_windows = [None, *set(filter(None, self.windows))]
        self._passes = self._programs()
        if self.parts.tensor_parallel is None:
            self.programs = self._passes.beside()
        self._score_memory: dict[tuple[int, ...], torch.Tensor] = {}
        self._plan: Pass
        if not self.captures:
            self.most_rows = self._most_recorded()

    def _most_recorded(self) -> int:
        from specattn.blocks.kernels import widens  # the C++ kernels

        return MOST_ROWS_OF_16_BITS if widens(self.model.dtype) else MOST_ROWS

    def _programs(self) -> Replayed:
        """Return what replays passes."""
        return recorded()

    def _eager(self) -> Ops:
        """Return the operators of a pass of many rows."""
        from specattn.blocks.kernels import Kernels, Memory  # the C++ kernels

        return Kernels(Memory())

    @torch.no_grad()
    def features(self, plan: Pass, tokens: torch.Tensor) -> torch.Tensor:
        """Return the features [B, T, H * layers] of a pass, whose products torch computes."""
        ops, positions = self._eager(), plan.positions.int()
        start, head_dim = positions.new_zeros(len(tokens)), self.attention.cache.head_dim

        def attend(n: int, weights: Attention | Latents, x: torch.Tensor) -> torch.Tensor:
            if isinstance(weights, Latents):
                turned = Place(*self._angles[""], start, positions).cos_sin(torch.float32)
                of_latents = latent_heads(ops, weights, x, Rotated(*turned))
                return plan.attend_latents(ops, n, weights, of_latents)
            place = Place(*self._angles[weights.rope], start, positions)
            heads = rotated(ops, weights, x, head_dim, place, None)
            scale: Any = {"softmax_scale": weights.scaling, "softcap": weights.softcap}
            return plan.attend(n, *heads, sinks=weights.sinks, **scale)

        streams = self._streams(plan, tokens)
        return features(ops, self.parts, tokens, attend, plan.recall, streams)[1]

    def run(self, plan: Pass, tokens: torch.Tensor) -> Verification:
        """Run a pass; one of more rows goes through the model's modules."""
        if tokens.numel() > self.most_rows:
            return super().run(plan, tokens)
        return self._replay(self._key(plan), plan, tokens, None)

    def _replay(
        self, key: Hashable, plan: Pass, tokens: torch.Tensor, size: Size | None
    ) -> Verification:
        """Run a pass as `Replayed.run_as` has it; of a larger size all of that is handed out."""
        collected = () if plan.capture.needs_python else plan.capture.rows
        how = _How(self._in_python(plan), collected, plan.capture.per_head)
        program, inputs = partial(self._pass, how), self._inputs(plan, tokens)
        with self._planned(plan):
            found = self._passes.run_as(size, key, program, inputs)
        logits, features, scores, queries, *chosen = found
        scores = plan.scores if scores is None else scores
        queries = plan.queries if queries is None else queries
        return self._handed_out(plan, logits, features, scores, queries, *chosen)

    @contextmanager
    def _planned(self, plan: Pass) -> Iterator[None]:
        """Let steps in Python of a program find their plan, which may hold a drafter or the model.

        A runner outlives both, so it keeps none, of a pass that fails neither.
        """
        self._plan = plan
        try:
            yield
        finally:
            del self._plan

    def _in_python(self, plan: Pass) -> bool:
        return plan.capture.needs_python or self.attention.in_python(plan)

    def _key(self, plan: Pass) -> Any:
        """Return what passes differ by beside their shapes."""
        own_states = plan.states is plan.cache.states
        key = self._in_python(plan), plan.capture, plan.max_seqlen, own_states, plan.feature_layers
        return *key, self.attention.key(plan)

    def _inputs(self, plan: Pass, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what changes from pass to pass."""
        given = {"tokens": tokens, "prefix": plan.prefix}
        if plan.depths is not None:
            given["depths"] = (plan.depths if plan.depths.dim() == 2 else plan.depths[None]).int()
        if plan.parents is not None and plan.states is not None:
            given["parents"] = plan.parents
        given |= self.attention.inputs(plan)
        windows = self._distinct_windows if self._trims_masks else [None]
        if plan.tree_mask is None and (self._least_window >= plan.rows or len(windows) == 1):
            return given
        sizes = {"T": plan.rows, "S": plan.rows}
        for window in windows:
            mask, depths = packed_mask(plan.tree_mask, sizes, window, tokens.device)
            if mask is not None:
                given[f"mask within {window}"] = mask
            if depths is not None:
                given[f"depths within {window}"] = depths.int()
        return given

    def _pass(
        self,
        how: _How,
        ops: Ops,
        tokens: torch.Tensor,
        **inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return logits, features, and scores and queries, unless the plan has these."""
        in_python, rows, per_head = how
        scores = self._scores(len(tokens), per_head) if rows else None
        head_dim = self.attention.cache.head_dim

        turned = self._turned(ops, tokens, inputs) if self._has_latents else None

        def attend(n: int, weights: Attention | Latents, x: torch.Tensor) -> torch.Tensor:
            if isinstance(weights, Latents):
                assert turned is not None
                scale: Any = {"softmax_scale": weights.scaling, "softcap": 0.0, "sinks": None}
                of_latents = latent_heads(ops, weights, x, turned)
                return absorbed(ops, weights, of_latents, lambda *new: to_cache(n, new, scale))
            place = Place(*self._angles[weights.rope], inputs["prefix"], inputs.get("depths"))
            to = self.attention.store(n, tokens.shape[1], "mask within None" not in inputs)
            heads = rotated(ops, weights, x, head_dim, place, to)
            scale = {"softmax_scale": weights.scaling, "softcap": weights.softcap}
            return to_cache(n, heads, scale | {"sinks": weights.sinks})

        def to_cache(n: int, heads: Heads, scale: dict[str, Any]) -> torch.Tensor:
            window = self.windows[n]
            if in_python and window is None:
                return ops.step(lambda: self._plan.attend(n, *heads, **scale))
            within = window if self._trims_masks else None
            visible = {"window": window, "tree_mask": inputs.get(f"mask within {within}")}
            visible["depths"] = inputs.get(f"depths within {within}")
            own = None
            if scores is not None and window is None:
                own = Collected(rows, scores[self.windows[:n].count(None)])
            return self.attention.attend(ops, n, heads, inputs, own, **visible, **scale)

        def recall(n: int) -> StateRows:
            return self._plan.recall(n, inputs.get("parents"))

        streams = self._streams(self._plan, tokens)
        return *decoder(ops, self.parts, tokens, attend, recall, streams), scores, None

    def _streams(self, plan: Pass, tokens: torch.Tensor) -> Streams | None:
        """Return where a pass hands out features, None for what the head reads."""
        if plan.feature_layers == (HEAD,):
            return None
        return Streams(plan.feature_layers, self.parts.embedding, tokens.shape)

    def _turned(self, ops: Ops, tokens: torch.Tensor, inputs: dict[str, torch.Tensor]) -> Rotated:
        """Return how the rows of a pass are turned, looked up once for all layers."""
        depths = inputs.get("depths")
        if depths is None:
            depths = torch.arange(tokens.shape[1], device=tokens.device)[None]
        place = Place(*self._angles[""], inputs["prefix"], depths)
        return Rotated(*ops.step(lambda: torch.stack(place.cos_sin(torch.float32))).unbind())

    def _scores(self, batch: int, per_head: bool) -> torch.Tensor:
        cache = self.attention.cache
        heads = (cache.storage.shape[-2],) * per_head
        size = (self.windows.count(None), batch, *heads, cache.width)
        if size not in self._score_memory:
            self._score_memory[size] = cache.storage.new_empty(size, dtype=torch.float32)
        return self._score_memory[size]


def _angles(
    parts: Parts, attention: LayerAttention
) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
    """Return cosines and sines by position, for every rope and for none."""
    cache = attention.cache
    still = cache.storage.new_ones(max(cache.capacity, 2), 1, dtype=torch.float32)
    like = cache.storage.new_empty(0, dtype=cache.dtype)
    angles: dict[str | None, Any] = {None: (still, torch.zeros_like(still))}
    for name in parts.ropes if parts.rotary is not None else ():
        kind = [name] if name else []
        angles[name] = angle_tables(
            parts.rotary, like, cache.capacity, *kind, longest=attention.longest
        )
    return angles
