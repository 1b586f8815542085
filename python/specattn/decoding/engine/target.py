"""The target: a Hugging Face causal model whose attention runs on our cache and kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from specattn.decoding.engine.workspace import Conditions, Workspace
from specattn.decoding.model.families import (
    cache_shape,
    check_length,
    check_supported,
    has_latents,
    has_states,
    turning_ropes,
    windows_of,
)
from specattn.decoding.model.model import Model
from specattn.decoding.model.quantised import quantised
from specattn.decoding.model.structure import structure_of
from specattn.decoding.model.text_model import check_device, text_model
from specattn.decoding.passes.cached_model import CachedModel, new_cache
from specattn.decoding.passes.interface import attach
from specattn.decoding.passes.padding import SPARE
from specattn.decoding.passes.proving import proved
from specattn.decoding.passes.replay import Compile, runner_of
from specattn.decoding.passes.runner import LayerAttention, Runner, Verification
from specattn.decoding.passes.seen import Seen
from specattn.decoding.ranks.lockstep import Lockstep
from specattn.decoding.ranks.split_prefill import split_features
from specattn.decoding.text.statistics import Clock
from specattn.distributed.context import ContextCache
from specattn.distributed.tensor import TensorParallel
from specattn.kv_cache import KVCache
from specattn.tree import Tree

T = TypeVar("T")

KV_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Types of 8 bits that a target may keep keys and values in, by name."""


class Target(CachedModel):
    """A model that is proved to decode as it does by itself, with a cache for a batch of requests.

    The model can be used for anything else meanwhile, by other targets and threads too: a pass that
    is not a target's attends as it did before (`attach`).

    Parameters
    ----------
    model : PreTrainedModel
        On one device, or divided over ranks by transformers' plan, of which the cache then holds
        this rank's heads; one that reads more than text decodes text alone (`text_model`).
    batch, capacity : int
        Requests, and tokens that the cache holds for each; on a GPU `SPARE` more, which may be
        padding.
    compile : {"auto", "on", "off"}
        Whether passes of few rows are replayed, as kernel calls on a CPU (`KernelRunner`) and as
        CUDA graphs (`CapturedRunner`, else `GraphRunner`), or run through the model's own modules:
        "auto" where both were found to agree, saying once where they cannot, "on" or else an error,
        or never.
    kv_dtype : {"int8", "fp8", "fp8_e5m2"}, optional
        Store keys and values in 8 bits, each row of a head with a scale of its own; "fp8" is
        float8_e4m3fn. By default in the model's own type. Passes over one row and over several
        may round a key to neighbouring steps, and a near-tie of logits otherwise.
    quantize : {"int8", "int4", "fp8"}, optional
        Decode a model with the same weights in 8 or 4 bits (`quantised`), which is remembered.
    lockstep : Lockstep, optional
        Ranks that share the cache or the model; each has a target of its own, and runs the same
        passes.
    lasting : bool
        Borrow what the last run of the model computed in, where it fits: until `give_back`.
    longest : int, optional
        Tokens of a text that passes read at most; what the cache holds beyond is room for drafts.

    Attributes
    ----------
    cache : KVCache
    windows : list of (int or None)
        Sliding window of each layer, None where the cache is never longer than it, 0 where the
        layer keeps a state in place of keys.
    full_layers : list of int
        The layers without one: those that sparse passes select for.
    embed, head : Module
        The model's embedding, and its head: `logits_of` makes logits of features.
    lockstep : Lockstep or None
    tensor_parallel : TensorParallel or None
        The ranks that the model is divided over.
    q_heads : int
        Heads that this rank attends with.

    Raises
    ------
    TypeError
        It is no model of transformers, such as a wrapper around one.
    ValueError
        `kv_dtype` is unknown; the model does not compute with our attention what it computes with
        its own (`prove`), its rope depends on the length, or it is spread over several devices or
        offloaded from them;
        with ``compile="on"``, it cannot be compiled; with `lockstep`, no layer of it has full
        attention.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        capacity: int,
        compile: Compile = "auto",
        lockstep: Lockstep | None = None,
        kv_dtype: str | None = None,
        quantize: str | None = None,
        lasting: bool = False,
        longest: int | None = None,
    ):
        model = text_model(model)
        check_supported(model.config)
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype: expected None or one of {[*KV_DTYPES]}, got {kv_dtype!r}")
        if quantize is not None:
            model = quantised(model, quantize)
        check_length(model.config, capacity if longest is None else longest)
        check_device(model)
        self.lockstep, self.tensor_parallel = lockstep, Model.ranks_of(model)
        self.q_heads = model.config.num_attention_heads
        if self.tensor_parallel is not None:  # which refuses heads that it cannot divide
            _, kv_heads, _, _ = cache_shape(model.config)
            self.q_heads, _ = self.tensor_parallel.heads(self.q_heads, kv_heads)
        attach(model)
        self._structure = proved(model)
        self._lock = threading.Lock()
        self._compile, self._lasting = compile, lasting and lockstep is None
        self._rounded = dict[str, CachedModel]()
        spare = SPARE if model.device.type == "cuda" and lockstep is None else 0
        stored = None if kv_dtype is None else KV_DTYPES[kv_dtype]
        turned_by = longest if turning_ropes(model.config) else None
        self.workspace = self._workspace(model, batch, capacity + spare, stored, turned_by)
        self.workspace.cache.spare = spare
        super().__init__(model, self.workspace.cache, self.workspace.windows, longest)
        if self.workspace.runner is None:
            self.workspace.runner = self._runner(self)
        self.runner = self.workspace.runner

    def _workspace(
        self,
        model: PreTrainedModel,
        batch: int,
        capacity: int,
        stored: torch.dtype | None,
        turned_by: int | None,
    ) -> Workspace:
        """Return the last run's workspace, if it fits and this target is to borrow it, or make one.

        One that was outgrown goes before its successor is made, which has a quarter more room: of
        texts that grow from run to run not every one makes a workspace.
        """
        conditions = seen = None
        windows = windows_of(model.config, capacity)
        if self._lasting:
            number = self._structure.number
            conditions = Conditions.of(model, batch, stored, self._compile, number, turned_by)
            found = Model.of(model).take()
            if found is not None and found.fits(model, conditions, capacity, windows):
                return found
            if found is not None and found.cache.capacity < capacity:
                capacity = _with_room(model, capacity)
            del found
            seen = Seen(model)
        cache = self._cache(model, batch, capacity, windows, stored)
        return Workspace(conditions, seen, cache, windows)

    def _cache(
        self,
        model: PreTrainedModel,
        batch: int,
        capacity: int,
        windows: list[int | None],
        stored: torch.dtype | None,
    ) -> KVCache:
        lockstep, config = self.lockstep, model.config
        if lockstep is None or lockstep.context is None:
            return new_cache(model, batch, capacity, stored=stored)
        if has_states(config) or has_latents(config):
            kept = "states" if has_states(config) else "latents"
            kind = config.model_type
            raise ValueError(f"models of type {kind!r} keep {kept}, which ranks do not share yet")
        _, kv_heads, head_dim, _ = cache_shape(config)
        if self.tensor_parallel is not None:
            _, kv_heads = self.tensor_parallel.heads(config.num_attention_heads, kv_heads)
        size: Any = (batch, capacity, kv_heads, head_dim)
        where: Any = {"dtype": model.dtype, "device": model.device, "stored": stored}
        return ContextCache(lockstep.context, windows, *size, **where)

    def give_back(self) -> None:
        """Leave the workspace to the next run of the model: this target runs no more passes."""
        if self._lasting:
            self.cache.clear()
            Model.of(self.model).give_back(self.workspace)

    def recall(self, kind: Hashable, owner: Any, make: Callable[[], T]) -> T:
        """Return what a drafter keeps beside the target, where its last run left it if it did.

        Parameters
        ----------
        kind : Hashable
            What it is, and all that its sizes follow from beside the target's cache.
        owner : object
            Whose weights it computes with: made anew for another one, or one that has changed.
        make : callable
            ``make()`` returns memory and programs, which hold neither target nor model.
        """
        return self.workspace.recall(kind, owner, make)

    def beside(self, model: PreTrainedModel) -> CachedModel:
        """Return a model of the target's shapes that runs passes over the target's cache."""
        attach(model)
        found = CachedModel(model, self.cache, self.windows, self.longest)
        found.runner = self.recall("beside", model, lambda: self._runner(found))
        return found

    def rounded(self, weights: str) -> CachedModel:
        """Return the target with its weights rounded (`quantised`): one for all who draft by it."""
        if weights not in self._rounded:
            self._rounded[weights] = self.beside(quantised(self.model, weights, "weights"))
        return self._rounded[weights]

    def _runner(self, model: CachedModel) -> Runner:
        """Return what runs passes of this target's model, or of another one, over its cache."""
        attention = LayerAttention(self.cache, self.windows, model.longest)
        if isinstance(self.cache, ContextCache) and find_spec("specattn._cpu"):
            # It needs the C++ kernels.
            from specattn.decoding.ranks.sharded_attention import ShardedAttention

            attention = ShardedAttention(self.cache, self.windows, model.longest)
        together = self.lockstep is not None
        quiet = self.lockstep is not None and self.lockstep.ranks.rank != 0
        structure = self._structure if model is self else structure_of(model.model)
        options: Any = {"compared": together, "quiet": quiet}
        return runner_of(model, self._compile, attention, structure, **options)

    @property
    def divided_heads(self) -> TensorParallel | None:
        """The ranks over which the model's heads are divided, None where each has all of them."""
        divided = self.tensor_parallel is not None and self.tensor_parallel.divides_heads
        return self.tensor_parallel if divided else None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Serve one generation inside this context; RuntimeError while another one is served."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the target serves another generation: make a Target for each")
        try:
            yield
        finally:
            self.workspace.end_run()
            self._lock.release()

    def clock(self) -> Clock:
        """Return a clock by which something may be decided: the same on all ranks."""
        return Clock(self.device) if self.lockstep is None else self.lockstep.clock(self.device)

    def prefill_chunk(
        self, tokens: torch.Tensor, counts: Sequence[int], start: int, wanted: bool
    ) -> Sequence[torch.Tensor]:
        """Run a chunk of the prompts, its rows divided over the ranks of a sharded cache."""
        sharded = isinstance(self.cache, ContextCache)
        run = split_features if sharded else CachedModel.prefill_chunk
        return run(self, tokens, counts, start, wanted)

    def verify(self, tree: Tree, tokens: torch.Tensor, **options: Any) -> Verification:
        """Run a tree behind what is committed, as `CachedModel.verify`; ranks compare it first."""
        if self.lockstep is not None:
            self.lockstep.check(tree, tokens)
        return super().verify(tree, tokens, **options)

    def attend_committed(
        self, layer: int, q: torch.Tensor, seqlens: torch.Tensor, unseen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with a drafter's queries of all heads, as `KVCache.attend_committed` does."""

        def attend(own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.cache.attend_committed(layer, own, seqlens, unseen)

        if self.tensor_parallel is None:
            return attend(q)
        return self.tensor_parallel.by_heads(q, attend)


def _with_room(model: PreTrainedModel, capacity: int) -> int:
    """Return a quarter more, where so long a cache is read as one of `capacity` tokens is."""
    more, config = capacity + capacity // 4, model.config
    try:
        check_length(config, more)
    except ValueError:
        return capacity
    return more if windows_of(config, more) == windows_of(config, capacity) else capacity
