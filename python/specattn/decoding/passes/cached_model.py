"""A model with a KV cache for a batch of requests: prefill, verification, sparse drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from specattn.decoding.model.families import (
    cache_shape,
    has_latents,
    has_states,
    keeps_state,
    state_shape,
    turning_ropes,
)
from specattn.decoding.model.model import Model
from specattn.decoding.passes.attention import (
    HEAD,
    NO_CAPTURE,
    CaptureSpec,
    KVSelector,
    Pass,
    Selection,
)
from specattn.decoding.passes.interface import attach_streams
from specattn.decoding.passes.own_layers import own_layers
from specattn.decoding.passes.prompts import Prompts, prompts_of
from specattn.decoding.passes.runner import Runner, Verification
from specattn.decoding.text.draws import moved, uploaded
from specattn.hybrid_cache import HybridCache
from specattn.kv_cache import KVCache
from specattn.tree import Tree

if TYPE_CHECKING:
    from specattn.blocks import Drawing, Programs

REPORTED_EVERY = 0.5  # seconds between two reports of how far a prefill has come


class CachedModel:
    """Runs passes of a model, to which `attach` was applied, behind what its cache holds.

    Attributes
    ----------
    windows : list of (int or None)
        Sliding window of each layer; `full_layers` have none, and sparse passes select for these.
        0 stands for a layer that keeps a state.
    embed, head : Module
        The model's embedding, and its head: `logits_of` makes logits of features.
    feature_layers : tuple of int
        What its passes hand out as features, as `hand_out` has it.
    runner : Runner
        Runs its passes, by default through the model's own modules.
    positions : int or None
        Positions that the model has learned; None where it places a token anywhere.
    longest : int
        Tokens of a text that passes read at most, where the rope turns with their number; drafts
        that lie behind are placed at the last one. Else, and by default, what the cache holds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        windows: list[int | None],
        longest: int | None = None,
    ):
        self.model, self.cache, self.windows = model, cache, windows
        self.device = model.device
        self.full_layers = [n for n, window in enumerate(windows) if window is None]
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.own_layers = own_layers(model)
        self.feature_layers: tuple[int, ...] = (HEAD,)
        self.runner = Runner(model)
        self.positions = learned_positions(model)
        turns = longest is not None and bool(turning_ropes(model.config))
        self.longest = longest if turns and longest is not None else cache.capacity
        self._on_layer: Callable[[int], None] | None = None  # of the prefill under way
        self._last_position = max(min(self.longest, self.positions or self.longest), 2) - 1

    def hand_out(self, layers: Sequence[int]) -> None:
        """Let passes hand out the residual stream behind so many layers each, side by side.

        `HEAD` stands for what the model's head reads, the default. ValueError: the model has no
        layers of its own.
        """
        self.feature_layers = tuple(layers)
        if self.feature_layers != (HEAD,):
            attach_streams(self.model)

    @cached_property
    def weights_nbytes(self) -> int:
        """Bytes of the model's weights, which a pass of one row reads."""
        return sum(one.nbytes for one in (*self.model.parameters(), *self.model.buffers()))

    def programs(self) -> Programs:
        """Return how a drafter beside the model should run its own functions of `ops`."""
        return self.runner.programs.beside()

    def prefill(
        self,
        prompts: Sequence[torch.Tensor],
        chunk_size: int,
        on_chunk: Callable[[int, int], None] | None = None,
        on_features: Callable[[int, Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        """Fill the empty cache with one prompt per request, `chunk_size` tokens of each at a time.

        ``on_chunk(done, total)``, in tokens, is called before the first chunk and after each, and
        within one that takes long, where a layer counts for its share of the chunk's tokens;
        ``on_features(start, features)`` after each chunk: of every request the features [rows, F]
        of its tokens ``start, start + 1, ...``, none where its prompt has ended. ValueError: the
        model has not learned so many positions.
        """
        if self.cache.states is not None:
            self.cache.states.clear()
        lengths = [len(prompt) for prompt in prompts]
        total, longest = sum(lengths), max(lengths)
        self.check_read(longest)
        starts = range(0, longest, chunk_size)
        parts = [[prompt[start : start + chunk_size] for prompt in prompts] for start in starts]
        sizes = [[len(part) for part in own] for own in parts]
        each = [part for own in parts for part in own]
        together = moved(torch.cat(each or [prompts[0]]), self.device)  # which may be empty
        chunks = together.split([sum(counts) for counts in sizes])
        ends = [[min(length, start + chunk_size) for length in lengths] for start in starts]
        seqlens = uploaded(ends, self.device, dtype=torch.int32)
        for start, tokens, counts, done in zip(starts, chunks, sizes, seqlens, strict=True):
            if on_chunk is not None:
                read = sum(min(length, start) for length in lengths)
                self._on_layer = self._reporting(on_chunk, read, len(tokens), total)
            features = self.prefill_chunk(tokens, counts, start, on_features is not None)
            self.cache.seqlens = done.clone()  # which lies at whole 16 bytes
            if on_features is not None:
                on_features(start, features)
        self._on_layer = None
        if on_chunk is not None:
            on_chunk(total, total)

    def _reporting(
        self, on_chunk: Callable[[int, int], None], read: int, new: int, total: int
    ) -> Callable[[int], None] | None:
        """Report that so many tokens are read; return what does so while `new` ones are."""
        on_chunk(read, total)
        if self.device.type != "cpu":  # a GPU is behind the host, who waits for nothing
            return None
        last, layers = time.monotonic(), len(self.windows)

        def on_layer(layer: int) -> None:
            nonlocal last
            if time.monotonic() - last > REPORTED_EVERY:
                last = time.monotonic()
                on_chunk(read + new * layer // layers, total)

        return on_layer

    def check_read(self, length: int, request: str = "a prompt") -> None:
        """Raise ValueError where so many tokens of a request are more than the model can place."""
        if self.positions is not None and length > self.positions:
            raise ValueError(
                f"the model has learned {self.positions} positions; {request} needs {length}"
            )

    def prefill_chunk(
        self, tokens: torch.Tensor, counts: Sequence[int], start: int, wanted: bool
    ) -> Sequence[torch.Tensor]:
        """Run a part of every prompt from `start` on, side by side; return features if `wanted`."""
        plan = self.plan(max(counts), max_seqlen=start + max(counts))
        plan.moves_states, plan.on_layer = True, self._on_layer
        plan.prompts = self._prompts()
        if min(counts) == max(counts):
            return self.runner.features(plan, tokens.view(len(counts), -1)).unbind()
        plan.counts = counts
        return self.runner.features(plan, tokens[None])[0].split(list(counts))

    def _prompts(self) -> Prompts | None:
        """Return what attends from prompts in place of our kernels, if there is such a thing."""
        cache = self.cache
        if not cache.in_kernels or cache.latent is not None:
            return None
        of: Any = self.model.config.get_text_config()
        heads = of.num_attention_heads, cache.storage.shape[-2]
        return prompts_of(self.device, cache.dtype, heads, cache.head_dim)

    def verify(
        self,
        tree: Tree,
        tokens: torch.Tensor,
        *,
        capture: CaptureSpec = NO_CAPTURE,
        reuse_buffers: bool = False,
    ) -> Verification:
        """Run a tree of tokens, int64 [B, T], behind what is committed.

        Its keys stay there until the next pass. With `reuse_buffers` the next pass may overwrite
        logits and features, too.
        """
        plan = self.plan(rows=tree.size)
        if not tree.is_chain:
            plan.tree_mask, plan.depths = tree.packed_mask, tree.depths
            plan.parents = tree.parents if tree.parents.dim() == 2 else tree.parents[None]
        if plan.states is not None:
            plan.states.verified(tree.size)
        plan.capture, plan.reuse_buffers = capture, reuse_buffers
        return self.runner.run(plan, tokens)

    def captured_rows(self, rows: int, capture: CaptureSpec = NO_CAPTURE) -> int | None:
        """Return in how many rows, all requests together, a verification of `rows` each would run.

        That is the size of the graph that serves it, of a larger batch perhaps. None: it would be
        captured first, or there are no graphs.
        """
        plan = self.plan(rows)
        plan.capture = capture
        return self.runner.captured_rows(plan)

    def draft(
        self,
        tokens: torch.Tensor,
        offset: int | torch.Tensor,
        selector: KVSelector | None = None,
    ) -> Verification:
        """Run a chain of tokens, int64 [B, T], that sees itself and selected tokens of the cache.

        It lies `offset`, an int or int32 [B], behind what is committed. Its keys and values are
        written like all others, so that a later chain can read them; layers with a state have one
        for drafts, which has seen what lies before the offset.
        """
        if isinstance(selector, Selection):
            selector = selector.settled()
        return self.runner.run(self._draft_plan(tokens.shape[1], offset, selector), tokens)

    def forget_draft(self) -> None:
        """Let the next draft begin behind what is committed: one was tried aside."""
        if self.cache.states is not None:
            self.cache.states.forget_draft()

    def draft_chain(
        self,
        root: torch.Tensor,
        selectors: Sequence[KVSelector | None],
        drawing: Callable[[], Drawing | None],
        steps: int | None = None,
    ) -> torch.Tensor | None:
        """Return `root`, int64 [B], and a token behind it per selector, all drafted by one launch.

        None where that is not possible: `drawing`, which is asked only where nothing else is in the
        way, may know of none. Selections must share their positions. Of fewer `steps` only these
        are drafted, or cut from a graph of more that there is already.
        """
        if not (selectors and self.runner.captures):
            return None
        first = self._draft_plan(1, 0, selectors[0])
        plans = [first, *(replace(first, selector=selector) for selector in selectors[1:])]
        return self.runner.chain(plans, root, drawing, len(plans) if steps is None else steps)

    def _draft_plan(
        self, rows: int, offset: int | torch.Tensor, selector: KVSelector | None
    ) -> Pass:
        plan = self.plan(rows=rows, offset=offset)
        plan.selector = selector
        if plan.states is not None:
            plan.states = plan.states.drafting(offset, plan.rows)
        return plan

    def plan(
        self, rows: int, offset: int | torch.Tensor = 0, max_seqlen: int | None = None
    ) -> Pass:
        """Return the plan of a causal chain of `rows` rows, `offset` behind what is committed."""
        max_seqlen = self.cache.capacity if max_seqlen is None else max_seqlen
        committed = self.cache.seqlens
        moved = isinstance(offset, torch.Tensor) or offset != 0
        prefix = committed + offset if moved else committed
        own: Any = {"states": self.cache.states, "own_layers": self.own_layers}
        own["feature_layers"] = self.feature_layers
        if self._last_position < self.cache.capacity - 1:
            own["last_position"] = self._last_position
        return Pass(self.cache, self.windows, rows, prefix, max_seqlen, **own)

    def logits_of(self, read: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] that the model makes of what its head reads, [..., H]."""
        return self.runner.logits_of(read)


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return how many positions a model has learned an embedding of; None: it has none of these."""
    known, tokens = (
        getattr(model.config, "max_position_embeddings", None),
        model.get_input_embeddings(),
    )
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module is not tokens:
            found = module.num_embeddings - getattr(module, "offset", 0)  # OPT's begin behind two
            if found == known:
                return found
    return None


def new_cache(model: PreTrainedModel, batch: int, capacity: int, **options: Any) -> KVCache:
    """Return an empty cache for a model, of this rank's heads; `options` as for `KVCache`."""
    config = model.config
    layers, kv_heads, head_dim, latent = cache_shape(config)
    if (ranks := Model.ranks_of(model)) is not None:
        _, kv_heads = ranks.heads(config.num_attention_heads, kv_heads)
    size: Any = (batch, capacity, kv_heads, head_dim)
    options = {"dtype": model.dtype, "device": model.device, **options}
    if ranks is not None and (has_states(config) or has_latents(config)):
        raise ValueError(f"models of type {config.model_type!r} are not divided over ranks yet")
    if not has_states(config):
        return KVCache(layers, *size, latent=latent, **options)
    return HybridCache(keeps_state(config), *size, shape=state_shape(config), **options)
