"""A pass of few rows as kernel calls over fixed buffers.

It computes what the model's modules compute, without them: with few rows, Python and products that
read weights slowly take most of a pass. A pass is recorded once for its shape (requests, rows, tree
or chain, what is captured) and run again from then on. Between kernels there may be steps in
Python: a mixture of experts, or a KV selector that asks for the queries of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import specattn._cpu as _cpu
from specattn.decoding.model.parts import Attention, GatedMLP, Parts, Projection, SubLayer
from specattn.decoding.passes.attention import Pass, Selection
from specattn.decoding.passes.compiling import MOST_ROWS
from specattn.decoding.passes.recording import UNIFORM, Recording
from specattn.decoding.ranks import dealt_attention
from specattn.distributed.context import ContextCache
from specattn.kv_cache import KVCache
from specattn.ops._tree_mask import packed_mask

_MOST_RECORDINGS = 64


class _Shape(NamedTuple):
    """What a recording depends on."""

    batch: int
    rows: int
    inputs: tuple[tuple[str, torch.Size], ...]
    collected: tuple[int, ...]  # rows whose scores the kernels collect
    per_head: bool  # whether these are kept for every KV head
    planned: bool  # full-attention layers attend in Python


class _Buffers(NamedTuple):
    """What a pass computes, one row per token."""

    x: torch.Tensor  # the residual stream
    normed: torch.Tensor
    added: torch.Tensor  # what a sub-layer adds to the stream
    heads: torch.Tensor  # queries, keys and values
    attended: torch.Tensor
    inner: torch.Tensor  # of the MLP
    features: torch.Tensor
    logits: torch.Tensor
    lse: torch.Tensor


class _Recorded(NamedTuple):
    """A recording, what it reads, and what it writes."""

    recording: Recording
    inputs: dict[str, torch.Tensor]
    logits: torch.Tensor
    features: torch.Tensor
    scores: torch.Tensor | None

    def take(self, given: dict[str, torch.Tensor]) -> None:
        """Copy what changes from pass to pass to where the recording reads it."""
        for name, value in given.items():
            self.inputs[name].copy_(value)


class StaticPass:
    """Runs passes of at most `MOST_ROWS` rows over a cache.

    Parameters
    ----------
    parts : Parts
    cache : KVCache
        On the CPU, in float32, bfloat16 or float16.
    windows : list of (int or None)
        Sliding window of each layer.

    Attributes
    ----------
    angles : dict of str or None to (Tensor, Tensor)
        By the name of a rope (`Parts.ropes`) its cosines and sines by position, float32 [capacity,
        half of what turns]; for None those that turn nothing.
    """

    keeps_scores = True  # in its own memory, where kernels collect them

    def __init__(self, parts: Parts, cache: KVCache, windows: list[int | None]):
        self.parts, self.cache, self.windows = parts, cache, windows
        self.angles = _angles(parts, cache)
        self._whole = not isinstance(cache, ContextCache)
        self._least_window = min((w for w in windows if w is not None), default=cache.capacity)
        self._buffers = _buffers(parts, cache)
        self._inputs: dict[tuple, torch.Tensor] = {}
        self._recordings: dict[_Shape, _Recorded] = {}
        self._plan: Pass

    def takes(self, plan: Pass) -> bool:
        """Whether it runs a plan: all of them, some with steps in Python."""
        return True

    def run(
        self, plan: Pass, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Run `tokens`, int64 [B, T], by a plan.

        Returns
        -------
        logits : Tensor [B, T, V]
        features : Tensor [B, T, H]
        scores : Tensor, float32 [full layers, B, N] or [full layers, B, Hk, N], or None
            Those that the plan captures, unless they are its own. They hold until the next pass.
        """
        given = self._given(plan, tokens)
        in_python, selector = plan.capture.needs_python, plan.selector
        chosen_before = selector is None or isinstance(selector, Selection) and self._whole
        shape = _Shape(
            batch=tokens.shape[0],
            rows=tokens.shape[1],
            inputs=tuple((name, x.shape) for name, x in given.items()),
            collected=() if in_python else plan.capture.rows,
            per_head=plan.capture.per_head,
            planned=in_python or not chosen_before,
        )
        self._plan = plan
        if (known := self._recordings.get(shape)) is not None:
            known.take(given)
            known.recording.replay()
        else:
            if len(self._recordings) >= _MOST_RECORDINGS:
                self._recordings.clear()
            known = self._recordings[shape] = self._recorded(shape, given)
        if plan.lent:
            return known.logits, known.features, known.scores
        return known.logits.clone(), known.features.clone(), known.scores

    def _given(self, plan: Pass, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what changes from pass to pass."""
        given = {"tokens": tokens, "prefix": plan.prefix}
        if plan.depths is not None:
            given["depths"] = plan.depths if plan.depths.dim() == 2 else plan.depths[None]
        if isinstance(self.cache, ContextCache):
            given |= dealt_attention.given(self.cache, plan)
        elif isinstance(plan.selector, Selection):
            given |= plan.selector._asdict()
        if plan.tree_mask is None and self._least_window >= plan.rows:
            return given
        sizes = {"T": plan.rows, "S": plan.rows}
        for window in {None, *self.windows}:
            mask, depths = packed_mask(plan.tree_mask, sizes, window, tokens.device)
            named = {_mask(window): mask, _depths(window): depths}
            given |= {name: x for name, x in named.items() if x is not None}
        return given

    def _recorded(self, shape: _Shape, given: dict[str, torch.Tensor]) -> _Recorded:
        """Run a pass and record it."""
        inputs = {name: self._input(name, x.shape, _dtype(name)) for name, x in given.items()}
        logits, features = (
            x[: shape.batch * shape.rows].view(shape.batch, shape.rows, -1)
            for x in (self._buffers.logits, self._buffers.features)
        )
        scores = self._scores(shape) if shape.collected else None
        recorded = _Recorded(Recording(), inputs, logits, features, scores)
        recorded.take(given)
        self._record(recorded.recording, shape, inputs)
        return recorded

    def _input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        key = (name, tuple(shape))
        if key not in self._inputs:
            self._inputs[key] = torch.empty(shape, dtype=dtype)
        return self._inputs[key]

    def _scores(self, shape: _Shape) -> torch.Tensor:
        heads = (self.cache.storage.shape[-2],) * shape.per_head
        size = (self.windows.count(None), shape.batch, *heads, self.cache.width)
        return self._input("scores", size, torch.float32)

    def _record(self, recording: Recording, shape: _Shape, inputs: dict[str, torch.Tensor]) -> None:
        """Run a pass and record it."""
        rows = _Buffers(*(x[: shape.batch * shape.rows] for x in self._buffers))
        parts, kernel = self.parts, recording.kernel
        self._embed(recording, inputs["tokens"], rows.x)
        if parts.embedding_scale != 1.0:
            recording.python(lambda: _scale(rows.x, parts.embedding_scale))
        for n, layer in enumerate(parts.layers):
            read = _enter(recording, layer.around_attention, rows)
            heads = layer.attention
            recording.product(read, (heads.q, heads.k, heads.v), rows.heads)
            self._attend(recording, n, shape, rows, inputs)
            self._leave(recording, layer.around_attention, (rows.attended, heads.out), rows)
            read = _enter(recording, layer.around_mlp, rows)
            if isinstance(layer.mlp, GatedMLP):
                gated = layer.mlp.gate, layer.mlp.up
                recording.product(read, gated, rows.inner, gate=layer.mlp.activation)
                self._leave(recording, layer.around_mlp, (rows.inner, layer.mlp.down), rows)
            else:
                _call(recording, layer.mlp, read, layer.around_mlp, rows, shape)
        kernel(_cpu.rms_norm, rows.x, *parts.norm, rows.features)
        if (tensor := parts.tensor_parallel) is None:
            recording.product(rows.features, (parts.head,), rows.logits)
            return
        own = rows.logits.new_empty(len(rows.logits), len(parts.head.weight))
        recording.product(rows.features, (parts.head,), own)
        recording.python(lambda: tensor.join("layers", own, rows.logits))

    def _embed(self, recording: Recording, tokens: torch.Tensor, x: torch.Tensor) -> None:
        """Record the embedding of tokens, of which each rank may have some."""
        embedding, tensor = self.parts.embedding, self.parts.tensor_parallel
        if tensor is None:
            recording.kernel(_cpu.embed, tokens, embedding, x)
            return

        def step() -> None:
            local = tokens.flatten() - tensor.rank * len(embedding)
            others = (local < 0) | (local >= len(embedding))
            torch.index_select(embedding, 0, local.masked_fill(others, 0), out=x)
            tensor.sum_in_place("layers", x.masked_fill_(others[:, None], 0.0))

        recording.python(step)

    def _leave(
        self,
        recording: Recording,
        around: SubLayer,
        last: tuple[torch.Tensor, Projection],
        rows: _Buffers,
    ) -> None:
        """Record a sub-layer's last product and its way into the residual stream."""
        (read, projection), tensor = last, self.parts.tensor_parallel
        if around.out_norm is None and around.factor == 1.0 and tensor is None:
            recording.product(read, (projection,), rows.x, residual=rows.x)
            return
        recording.product(read, (projection,), rows.added)
        if tensor is not None:
            ranks = tensor
            recording.python(lambda: ranks.sum_in_place("layers", rows.added))
        _add(recording, around, rows)

    def _attend(
        self,
        recording: Recording,
        n: int,
        shape: _Shape,
        rows: _Buffers,
        inputs: dict[str, torch.Tensor],
    ) -> None:
        """Norm, rotate and store the heads of layer `n`, and attend."""
        layer, window, cache = self.parts.layers[n].attention, self.windows[n], self.cache
        k_cache, v_cache = self._stored(n)
        kv_heads, head_dim = cache.storage.shape[-2:]
        by_token = (shape.batch, shape.rows)
        heads = rows.heads.view(*by_token, -1, head_dim)
        q_heads = heads.shape[2] - 2 * kv_heads
        q, k, v = heads.split([q_heads, kv_heads, kv_heads], 2)
        out, lse = rows.attended.view(q.shape), rows.lse.view(q.shape[:-1])
        prefix, depths = inputs["prefix"], inputs.get("depths")
        norms = _norm_whole_rows(recording, layer, rows.heads)
        eps = layer.q_norm.eps if layer.q_norm else 0.0
        turned = (heads, q_heads, *norms, eps, *self.angles[layer.rope], prefix, depths)
        recording.kernel(_cpu.rotate_heads, *turned, k_cache, v_cache, None)
        scale = (layer.scaling, layer.softcap, layer.sinks)
        tree = inputs.get(_mask(window)), inputs.get(_depths(window))
        hybrid = (q, k_cache, v_cache, prefix, None, None, *tree, None, window, *scale, *UNIFORM)
        full_layer = self.windows[:n].count(None)
        if shape.planned and window is None:
            recording.python(lambda: self._attend_as_planned(n, layer, (q, k, v), out))
        elif isinstance(cache, ContextCache) and window is None:
            collected = self._collected(shape, full_layer)
            given = (inputs, tree[0], scale, collected)
            dealt_attention.record(recording, cache, n, (q, k, v), *given, (out, lse))
        elif window is None and "indices" in inputs:
            selected = inputs["indices"][full_layer], inputs["lengths"]
            sparse = (q, k_cache, v_cache, *selected, k, v, None, None, *scale, None, *UNIFORM)
            recording.kernel(_cpu.sparse_gather_attention, *sparse, out, lse)
        elif window is None and shape.collected:
            collect = ("scores", list(shape.collected), shape.per_head)
            scores = self._scores(shape)[full_layer]
            recording.kernel(_cpu.verify_attention, *hybrid, *collect, out, lse, scores)
        else:
            recording.kernel(_cpu.hybrid_tree_attention, *hybrid, out, lse)

    def _stored(self, n: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return where a layer stores its heads as it rotates them; None where it does not."""
        if not isinstance(self.cache, ContextCache):
            return self.cache.layer(n)
        if self.windows[n] is None:
            return None, None
        return self.cache.whole.layer(self.cache.place(n))

    def _collected(self, shape: _Shape, full_layer: int) -> dealt_attention.Collected | None:
        if not shape.collected:
            return None
        rows = list(shape.collected)
        return dealt_attention.Collected(rows, shape.per_head, self._scores(shape)[full_layer])

    def _attend_as_planned(
        self, n: int, layer: Attention, heads: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        """Attend by the plan of the pass that runs now."""
        scale: Any = {
            "softmax_scale": layer.scaling,
            "softcap": layer.softcap,
            "sinks": layer.sinks,
        }
        out.copy_(self._plan.attend(n, *heads, **scale))


def _mask(window: int | None) -> str:
    return f"mask within {window}"


def _depths(window: int | None) -> str:
    return f"depths within {window}"


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name == "tokens" or name.startswith("mask") else torch.int32


def _enter(recording: Recording, around: SubLayer, rows: _Buffers) -> torch.Tensor:
    """Record what comes before a sub-layer; return the rows that it reads."""
    if around.norm is None:
        return rows.x
    recording.kernel(_cpu.rms_norm, rows.x, *around.norm, rows.normed)
    return rows.normed


def _add(recording: Recording, around: SubLayer, rows: _Buffers) -> None:
    """Record ``x += factor * out_norm(added)``."""
    if around.out_norm is not None:
        recording.kernel(_cpu.rms_norm, rows.added, *around.out_norm, rows.added)
    recording.python(lambda: _accumulate(rows.x, rows.added, around.factor))


def _call(
    recording: Recording,
    module: nn.Module,
    read: torch.Tensor,
    around: SubLayer,
    rows: _Buffers,
    shape: _Shape,
) -> None:
    """Record a module that is no kernel, and its way into the residual stream."""
    given = read.view(shape.batch, shape.rows, -1)

    def step() -> None:
        output: Any = module(given)
        output = (output[0] if isinstance(output, tuple) else output).reshape(rows.x.shape)
        if around.out_norm is None:
            _accumulate(rows.x, output, around.factor)
        else:
            rows.added.copy_(output)

    recording.python(step)
    if around.out_norm is not None:
        _add(recording, around, rows)


def _scale(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


def _accumulate(x: torch.Tensor, added: torch.Tensor, factor: float) -> None:
    x.add_(added, alpha=factor)


def _norm_whole_rows(
    recording: Recording, layer: Attention, heads: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Record norms over all heads at once, or return those that are over each."""
    if layer.q_norm is None or layer.k_norm is None:
        return None, None
    if not layer.norms_whole_rows:
        return layer.q_norm.weight, layer.k_norm.weight
    q, k, _ = heads.split([len(x.weight) for x in (layer.q, layer.k, layer.v)], 1)
    recording.kernel(_cpu.rms_norm, q, *layer.q_norm, q)
    recording.kernel(_cpu.rms_norm, k, *layer.k_norm, k)
    return None, None


def _buffers(parts: Parts, cache: KVCache) -> _Buffers:
    """Return buffers for most rows; memory that no pass touches is none."""
    layer = parts.layers[0].attention
    width = parts.embedding.shape[1]
    heads = sum(x.weight.shape[0] for x in (layer.q, layer.k, layer.v))
    inner = max(
        (x.mlp.gate.weight.shape[0] for x in parts.layers if isinstance(x.mlp, GatedMLP)),
        default=0,
    )
    attended = layer.q.weight.shape[0]
    widths = [width, width, width, heads, attended, inner, width, parts.vocabulary]
    storage = cache.storage
    lse = torch.empty(MOST_ROWS, attended // storage.shape[-1])
    return _Buffers._make([*(storage.new_empty(MOST_ROWS, n) for n in widths), lse])


def _angles(parts: Parts, cache: KVCache) -> dict[str | None, tuple[torch.Tensor, torch.Tensor]]:
    """Return cosines and sines by position, for every rope and for none."""
    positions = torch.arange(max(cache.capacity, 2), device=cache.storage.device)
    rotary: Any = parts.rotary
    still = torch.ones(len(positions), 1)
    angles: dict[str | None, Any] = {None: (still, torch.zeros_like(still))}
    for name in parts.ropes:
        with torch.no_grad():
            tables = rotary(cache.storage[:0], positions[None], *filter(None, [name]))
        cos, sin = (x[0].float() for x in tables)
        half = cos.shape[-1] // 2
        if not cos[:, :half].equal(cos[:, half:]):  # most modules say every angle twice
            half = cos.shape[-1]
        angles[name] = cos[:, :half].contiguous(), sin[:, :half].contiguous()
    return angles
