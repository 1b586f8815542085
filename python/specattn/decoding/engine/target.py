"""The target: a Hugging Face causal model whose attention runs on our cache and kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedModel

from specattn.decoding.model.families import (
    cache_shape,
    check_length,
    check_supported,
    transform_logits,
    transforms_logits,
    windows_of,
)
from specattn.decoding.model.text_model import text_model
from specattn.decoding.passes.attention import (
    NO_CAPTURE,
    CaptureSpec,
    KVSelector,
    Pass,
    attach,
    features_of,
)
from specattn.decoding.passes.compiling import MOST_ROWS, Compile, static_pass
from specattn.decoding.passes.proving import prove
from specattn.decoding.ranks.lockstep import Lockstep
from specattn.decoding.ranks.split_prefill import split_features
from specattn.decoding.text.statistics import Clock
from specattn.distributed.context import ContextCache
from specattn.distributed.tensor import TensorParallel
from specattn.kv_cache import KVCache
from specattn.tree import Tree

if TYPE_CHECKING:
    from specattn.decoding.passes.captured_pass import CapturedPass
    from specattn.decoding.passes.static_pass import StaticPass


class Verification(NamedTuple):
    """What a verification hands out.

    Attributes
    ----------
    logits : Tensor [B, T, V]
    features : Tensor [B, T, H]
        What the head of the model reads: the last layer's output, normalised.
    scores : Tensor, float32 [full layers, B, N], or None
        Mean over the captured rows and all heads; -inf beyond the prefix. With
        `CaptureSpec.per_row` the mean over the heads of every row, [full layers, B, rows, N]; with
        `CaptureSpec.per_head` over the heads of every KV head, [..., Hk, N]. In float64 of a
        float64 model.
    queries : Tensor [full layers, B, T, Hq, D], or None
    """

    logits: torch.Tensor
    features: torch.Tensor
    scores: torch.Tensor | None = None
    queries: torch.Tensor | None = None


class Target:
    """A model with a cache for a batch of requests.

    The model can be used for anything else meanwhile, by other targets and threads too: a pass that
    is not a target's attends as it did before (`attach`).

    Parameters
    ----------
    model : PreTrainedModel
        On one device, or divided over ranks by transformers' plan, of which the cache then holds
        this rank's heads; one that reads more than text decodes text alone (`text_model`).
    batch, capacity : int
        Requests, and tokens that the cache holds for each.
    compile : {"auto", "on", "off"}
        Whether passes of few rows are replayed, as kernel calls on a CPU (`StaticPass`) and as CUDA
        graphs (`CapturedPass`), or run through the model's own modules: "auto" where both were
        found to agree, saying once where they cannot, "on" or else an error, or never.
    lockstep : Lockstep, optional
        Ranks that share the cache or the model; each has a target of its own, and runs the same
        passes.

    Attributes
    ----------
    cache : KVCache
    windows : list of (int or None)
        Sliding window of each layer, None where the cache is never longer than it.
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
    ValueError
        The model does not compute with our attention what it computes with its own (`prove`), its
        rope depends on the length, or it is spread over several devices; with ``compile="on"``, it
        cannot be compiled; with `lockstep`, no layer of it has full attention.
    """

    static: StaticPass | CapturedPass | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        capacity: int,
        compile: Compile = "auto",
        lockstep: Lockstep | None = None,
    ):
        check_supported(model.config)
        model = text_model(model)
        check_length(model.config, capacity)
        devices = {str(parameter.device) for parameter in model.parameters()}
        if len(devices) > 1:
            raise ValueError(f"the model must be on one device, got {', '.join(sorted(devices))}")
        attach(model)
        prove(model)
        self._hold(model, batch, capacity, windows_of(model.config, capacity), lockstep)
        self.static = static_pass(self, compile)

    def _hold(
        self,
        model: PreTrainedModel,
        batch: int,
        capacity: int,
        windows: list[int | None],
        lockstep: Lockstep | None = None,
    ) -> None:
        """Keep the model, and a cache for it."""
        self._lock = threading.Lock()
        self.model = model
        self.device = model.device
        self.windows = windows
        self.full_layers = [n for n, window in enumerate(windows) if window is None]
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        layers, kv_heads, head_dim = cache_shape(model.config)
        self.q_heads = model.config.num_attention_heads
        self.tensor_parallel = TensorParallel.of(model)
        if self.tensor_parallel is not None:
            self.q_heads, kv_heads = self.tensor_parallel.heads(self.q_heads, kv_heads)
        size: Any = (batch, capacity, kv_heads, head_dim)
        where: Any = {"dtype": model.dtype, "device": model.device}
        self._transforms_logits = transforms_logits(model.config)
        self.lockstep = lockstep
        if lockstep is None or lockstep.context is None:
            self.cache = KVCache(layers, *size, **where)
        else:
            self.cache = ContextCache(lockstep.context, self.windows, *size, **where)

    @property
    def kernel_pass(self) -> StaticPass | None:
        """What runs passes as kernel calls over fixed buffers, if that does: whole, on a CPU."""
        static: Any = self.static if self.tensor_parallel is None else None
        return static if hasattr(static, "parts") else None

    @property
    def divided_heads(self) -> TensorParallel | None:
        """The ranks over which the model's heads are divided, None where each has all of them."""
        divided = self.tensor_parallel is not None and self.tensor_parallel.divides_heads
        return self.tensor_parallel if divided else None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Serve one generation inside this context.

        Raises
        ------
        RuntimeError
            Another generation is using the target: its cache holds one batch of texts.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the target serves another generation: make a Target for each")
        try:
            yield
        finally:
            self._lock.release()

    def clock(self) -> Clock:
        """Return a clock by which something may be decided: the same on all ranks."""
        return Clock(self.device) if self.lockstep is None else self.lockstep.clock(self.device)

    def prefill(
        self,
        prompts: Sequence[torch.Tensor],
        chunk_size: int,
        on_chunk: Callable[[int, int], None] | None = None,
        on_features: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Fill the empty cache with one prompt per request, `chunk_size` tokens of each at a time.

        Requests that end before a chunk does compute rows that nobody reads.

        Parameters
        ----------
        prompts : sequence of Tensor, int64 [L_b]
            May be empty.
        chunk_size : int
        on_chunk : callable, optional
            ``on_chunk(done, total)``, before the first chunk and after each, in tokens.
        on_features : callable, optional
            ``on_features(start, features)`` after each chunk: features [B, rows, H] of tokens
            ``start, start + 1, ...``; rows at or beyond a request's ``cache.seqlens`` mean nothing.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        total, longest = sum(map(len, prompts)), max(map(len, prompts))
        padded = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True).to(self.device)
        for start in range(0, longest, chunk_size):
            if on_chunk is not None:
                on_chunk(sum(min(len(prompt), start) for prompt in prompts), total)
            end = min(start + chunk_size, longest)
            tokens = padded[:, start:end]
            if isinstance(self.cache, ContextCache):
                features = split_features(self, tokens, end, wanted=on_features is not None)
            else:
                plan = self.plan(rows=end - start, max_seqlen=end)
                features = self.features(tokens, plan)
            self.cache.seqlens = lengths.clamp(max=end).to(torch.int32)
            if on_features is not None:
                on_features(start, features)
        if on_chunk is not None:
            on_chunk(total, total)

    def verify(
        self,
        tree: Tree,
        tokens: torch.Tensor,
        *,
        capture: CaptureSpec = NO_CAPTURE,
        lent: bool = False,
    ) -> Verification:
        """Run a tree behind what is committed; its keys stay there until the next pass.

        Parameters
        ----------
        tree : Tree
        tokens : Tensor, int64 [B, T]
        capture : CaptureSpec
        lent : bool
            Whether logits and features, too, need hold until the next pass alone.

        Returns
        -------
        Verification
        """
        if self.lockstep is not None:
            self.lockstep.check(tree, tokens)
        plan = self.plan(rows=tree.size)
        if not is_chain(tree):
            plan.tree_mask, plan.depths = tree.packed_mask, tree.depths
        plan.capture, plan.lent = capture, lent
        if capture is NO_CAPTURE:
            return self._run(tokens, plan)
        shape = (len(self.full_layers), self.cache.batch_size)
        if capture.rows and (capture.needs_python or not self._keeps_scores(tokens)):
            rows = (len(capture.rows),) * capture.per_row
            heads = (self.cache.storage.shape[-2],) * capture.per_head
            dtype = torch.promote_types(self.cache.storage.dtype, torch.float32)
            plan.scores = self.cache.storage.new_empty(
                *shape, *rows, *heads, self.cache.width, dtype=dtype
            )
        if capture.queries:
            heads = (self.q_heads, self.cache.storage.shape[-1])
            plan.queries = self.cache.storage.new_empty(*shape, tree.size, *heads)
        return self._run(tokens, plan)

    def draft(
        self, tokens: torch.Tensor, offset: int | torch.Tensor, selector: KVSelector
    ) -> Verification:
        """Run a chain that sees itself and selected tokens of the cache.

        Its keys and values are written like all others, so that a later chain can read them.

        Parameters
        ----------
        tokens : Tensor, int64 [B, T]
        offset : int, or Tensor, int32 [B]
            Tokens between what is committed and the chain.
        selector : KVSelector

        Returns
        -------
        Verification
            Logits and features.
        """
        plan = self.plan(rows=tokens.shape[1], offset=offset)
        plan.selector = selector
        return self._run(tokens, plan)

    def attend_committed(
        self, layer: int, q: torch.Tensor, seqlens: torch.Tensor, unseen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with a drafter's queries of all heads, as `KVCache.attend_committed` does."""

        def attend(own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.cache.attend_committed(layer, own, seqlens, unseen)

        if self.tensor_parallel is None:
            return attend(q)
        return self.tensor_parallel.by_heads(q, attend)

    def plan(
        self, rows: int, offset: int | torch.Tensor = 0, max_seqlen: int | None = None
    ) -> Pass:
        """Return the plan of a causal chain of `rows` rows, `offset` behind what is committed."""
        max_seqlen = self.cache.capacity if max_seqlen is None else max_seqlen
        committed = self.cache.seqlens
        moved = isinstance(offset, torch.Tensor) or offset != 0
        prefix = committed + offset if moved else committed
        return Pass(self.cache, self.windows, rows, prefix, max_seqlen)

    def _keeps_scores(self, tokens: torch.Tensor) -> bool:
        static = self.static
        return static is not None and static.keeps_scores and tokens.numel() <= MOST_ROWS

    def _run(self, tokens: torch.Tensor, plan: Pass) -> Verification:
        """Run a pass; one of few rows without Python, where that is known to be right."""
        static = self.static
        if static is not None and tokens.numel() <= MOST_ROWS and static.takes(plan):
            logits, features, scores = static.run(plan, tokens)
            scores = plan.scores if scores is None else scores
            if self._transforms_logits:
                logits = transform_logits(self.model.config, logits)
            return Verification(logits, features, scores, plan.queries)
        features = self.features(tokens, plan)
        return Verification(self.logits_of(features), features, plan.scores, plan.queries)

    def logits_of(self, features: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] that the model makes of features [..., H]."""
        return transform_logits(self.model.config, self.head(features))

    def features(self, tokens: torch.Tensor, plan: Pass) -> torch.Tensor:
        """Return the features [B, T, H] of a pass through the model's own modules."""
        attach(self.model)  # again: the implementation may have been set to another one meanwhile
        return features_of(self.model, tokens, plan)


def is_chain(tree: Tree) -> bool:
    """Whether the tree is one path, shared by all requests: causal, and already in order."""
    return tree.batch_size is None and tree.max_depth == tree.size - 1
