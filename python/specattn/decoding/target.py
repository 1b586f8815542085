"""The target: an ordinary Hugging Face causal model whose attention runs on our cache and kernels.

transformers hands every layer's queries and *new* keys and values to one registered function, and
passes on any extra keyword of the model call. So the whole adapter is that function, which writes
the new rows into our cache and calls one primitive, and `Pass`, the plan that tells it how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from specattn.kv_cache import KVCache
from specattn.ops import hybrid_tree_attention, sparse_gather_attention, verify_attention
from specattn.tree import Tree

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gpt_oss")
"""Values of ``model.config.model_type`` that are known to honour the contract and are tested."""

_SLIDES_IN_EVERY_LAYER = ("mistral", "qwen3_moe")
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_ATTENTION = "specattn"


@dataclass(frozen=True)
class Wanted:
    """What a drafter wants of a verification beside its logits and features.

    Attributes
    ----------
    rows : tuple of int
        Rows of the tree whose interest in the prefix is scored, -1 the last one; none: no scores.
        The default of who wants scores is Vegas' "Collect-2-Query" (section 3.3).
    ranking : {"logit", "weight"}
        Score by mean logit, which costs next to nothing, or by mean attention weight.
    each : bool
        Score by every row itself instead of their mean: as many times the memory.
    queries : bool
        Keep the queries of every full-attention layer.
    """

    rows: tuple[int, ...] = ()
    ranking: str = "logit"
    each: bool = False
    queries: bool = False


NOTHING = Wanted()
SCORES = Wanted(rows=(0, -1))


class Verification(NamedTuple):
    """What a verification hands out.

    Attributes
    ----------
    logits : Tensor [B, T, V]
    features : Tensor [B, T, H]
        What the head of the model made the logits of: the last layer's output, normalised.
    scores : Tensor, float32 [full layers, B, N], or None
        Mean over the wanted rows and all heads; -inf beyond the prefix. With `Wanted.each` the mean
        over the heads of every row, [full layers, B, rows, N]. In float64 of a float64 model.
    queries : Tensor [full layers, B, T, Hq, D], or None
    """

    logits: torch.Tensor
    features: torch.Tensor
    scores: torch.Tensor | None = None
    queries: torch.Tensor | None = None


class Reading(Protocol):
    """Says what a sparse pass reads of the cache; its own new rows are always read."""

    def at(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and their counts, as `sparse_gather_attention` takes them.

        Parameters
        ----------
        layer : int
            Number of the layer among the full-attention layers.
        q : Tensor [B, T, Hq, D]
            The pass's queries there.
        """


class Selection(NamedTuple):
    """A reading that was chosen before the pass.

    Attributes
    ----------
    indices : Tensor, int32 [full layers, B, W] or [full layers, B, Hk, W]
        Positions in ascending order, for all heads or for each KV head.
    lengths : Tensor, int32 [B] or [B, Hk]
        How many of them count.
    """

    indices: torch.Tensor
    lengths: torch.Tensor

    def at(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's positions, whatever it asks."""
        return self.indices[layer], self.lengths

    def longer(self, by: int | torch.Tensor) -> Selection:
        """Return it with so many positions more, for every request or int32 [B] for each."""
        if isinstance(by, torch.Tensor):
            by = by.view(-1, *[1] * (self.lengths.dim() - 1))
        return Selection(self.indices, self.lengths + by)


@dataclass
class Pass:
    """The plan of one call of the model: T new rows per request, stored behind what is committed.

    Attributes
    ----------
    cache : KVCache
    windows : list of (int or None)
        Sliding window of each layer.
    slots : tuple of Tensor
        Where the new rows go (`KVCache.slots`).
    prefix : Tensor, int32 [B]
        Cached tokens that every row may see.
    reach : int
        No row lies at or beyond this position: a host-side bound of what must be looked at.
    tree_mask : Tensor, packed, or None for a causal chain
    wanted : Wanted
    scores, queries : Tensor or None
        Filled with what is wanted (`Verification`).
    reading : Reading or None
        What full-attention layers read instead of the whole cache.
    per_head : Tensor [B, Hk, N], or None
        Room for the scores of one layer, which all layers use in turn.
    """

    cache: KVCache
    windows: list[int | None]
    slots: tuple[torch.Tensor, torch.Tensor]
    prefix: torch.Tensor
    reach: int
    tree_mask: torch.Tensor | None = None
    wanted: Wanted = NOTHING
    scores: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    reading: Reading | None = None
    per_head: torch.Tensor | None = None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store the new keys and values of a layer and attend: all [B, T, heads, D]."""
        self.cache.write(layer, k, v, self.slots)
        k_cache, v_cache = (x[:, : self.reach] for x in self.cache.layer(layer))
        window = self.windows[layer]
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "sinks": sinks}
        tree = (q, k_cache, v_cache, self.prefix, None, None, self.tree_mask)
        if window is not None:
            return hybrid_tree_attention(*tree, window=window, **options)[0]
        full_layer = self.windows[:layer].count(None)
        if self.reading is not None:
            read = self.reading.at(full_layer, q)
            return sparse_gather_attention(q, k_cache, v_cache, *read, k, v, **options)[0]
        if self.queries is not None:
            self.queries[full_layer] = q
        if self.scores is None:
            return hybrid_tree_attention(*tree, **options)[0]
        options["collect_rows"] = self.wanted.rows
        by_weight, each = self.wanted.ranking == "weight", self.wanted.each
        if not by_weight and not each:
            options["collected"] = self.per_head
            out, _, per_head = verify_attention(*tree, collect="scores", **options)
            heads = per_head.shape[1]
            # As a product with 1 / heads: three times as fast as torch's mean on a CPU.
            share = per_head.new_full((len(per_head), 1, heads), 1 / heads)
            torch.bmm(share, per_head, out=self.scores[full_layer][:, None])
            return out
        out, lse, logits = verify_attention(*tree, collect="logits", **options)
        ranks = logits.float()  # [B, rows, Hq, N]
        if by_weight:
            ranks = (ranks - lse[:, self.wanted.rows, :, None]).exp()
        scores, unseen = ranks.mean(2), logits[:, :, 0] == -torch.inf
        if not each:
            scores, unseen = scores.mean(1), unseen[:, 0]
        self.scores[full_layer] = scores.masked_fill(unseen, -torch.inf)
        return out


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    specattn_pass: Pass,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Serve transformers' attention interface: heads before rows coming in, after going out."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = specattn_pass.attend(module.layer_idx, q, k, v, softmax_scale=scaling, sinks=s_aux)
    return out, None


# No mask function of this name is registered, so models build no mask at all.
AttentionInterface.register(_ATTENTION, _attention)


class Target:
    """A model with a cache for a batch of requests.

    Parameters
    ----------
    model : PreTrainedModel
        Of one of `FAMILIES`, on one device.
    batch, capacity : int
        Requests, and tokens that the cache holds for each.

    Attributes
    ----------
    cache : KVCache
    full_layers : int
        Number of layers without a sliding window; those are the ones that sparse passes thin out.

    Raises
    ------
    ValueError
        The model's family or kind of rope is not supported, or it is spread over several devices.
    """

    def __init__(self, model: PreTrainedModel, batch: int, capacity: int):
        config = model.config
        if config.model_type not in FAMILIES:
            raise ValueError(
                f"models of type {config.model_type!r} are not supported; "
                f"supported are {', '.join(FAMILIES)}"
            )
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") in _LENGTH_DEPENDENT:
            raise ValueError(
                f"rope of type {rope['rope_type']!r} is not supported: it turns with the current "
                "length, so tokens that are verified together would not be what plain decoding says"
            )
        devices = {str(parameter.device) for parameter in model.parameters()}
        if len(devices) > 1:
            raise ValueError(f"the model must be on one device, got {', '.join(sorted(devices))}")
        self.model = model
        self.device = model.device
        self.windows = _windows(config, capacity)
        self.full_layers = self.windows.count(None)
        self._per_head: torch.Tensor | None = None
        self._head = model.get_output_embeddings()
        head_dim = getattr(config, "head_dim", None)
        self.cache = KVCache(
            config.num_hidden_layers,
            batch,
            capacity,
            config.num_key_value_heads,
            head_dim or config.hidden_size // config.num_attention_heads,
            dtype=model.dtype,
            device=model.device,
        )

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model attend through us inside this context, and as before after it."""
        before = self.model.config._attn_implementation
        self.attach()
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def attach(self) -> None:
        """Let the model attend through us from now on."""
        self.model.set_attn_implementation(_ATTENTION)

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
            plan = self._plan(rows=end - start, reach=end)
            features = self._run(padded[:, start:end], plan.slots[1], plan)
            self.cache.seqlens = lengths.clamp(max=end).to(torch.int32)
            if on_features is not None:
                on_features(start, features)
        if on_chunk is not None:
            on_chunk(total, total)

    def verify(self, tree: Tree, tokens: torch.Tensor, *, wanted: Wanted = NOTHING) -> Verification:
        """Run a tree behind what is committed; its keys stay there until the next pass.

        Parameters
        ----------
        tree : Tree
        tokens : Tensor, int64 [B, T]
        wanted : Wanted

        Returns
        -------
        Verification
        """
        plan = self._plan(rows=tree.size)
        if not is_chain(tree):
            plan.tree_mask = tree.packed_mask
        plan.wanted = wanted
        shape = (self.full_layers, self.cache.batch_size)
        if wanted.rows:
            rows = (len(wanted.rows),) if wanted.each else ()
            plan.scores = self.cache.storage.new_empty(
                *shape, *rows, self.cache.capacity, dtype=self._score_dtype
            )
            if wanted.ranking == "logit" and not wanted.each:
                plan.per_head = self._room_for_scores()
        if wanted.queries:
            heads = (self.model.config.num_attention_heads, self.cache.storage.shape[-1])
            plan.queries = self.cache.storage.new_empty(*shape, tree.size, *heads)
        features = self._run(tokens, self.cache.seqlens[:, None] + tree.depths, plan)
        return Verification(self._head(features), features, plan.scores, plan.queries)

    def draft(
        self, tokens: torch.Tensor, offset: int | torch.Tensor, reading: Reading
    ) -> Verification:
        """Run a chain, `offset` behind what is committed, on few tokens of the cache and itself.

        Its keys and values are written like all others, so that a later chain can read them.

        Parameters
        ----------
        tokens : Tensor, int64 [B, T]
        offset : int, or Tensor, int32 [B]
        reading : Reading

        Returns
        -------
        Verification
            Logits and features.
        """
        plan = self._plan(rows=tokens.shape[1], offset=offset)
        plan.reading = reading
        features = self._run(tokens, plan.slots[1], plan)
        return Verification(self._head(features), features)

    def _room_for_scores(self) -> torch.Tensor:
        """Return the room for one layer's scores by KV head, the same as long as it fits."""
        shape = (self.cache.batch_size, self.cache.storage.shape[-2], self.cache.capacity)
        if self._per_head is None or self._per_head.shape != shape:
            self._per_head = self.cache.storage.new_empty(shape, dtype=self._score_dtype)
        return self._per_head

    @property
    def _score_dtype(self) -> torch.dtype:
        """What `verify_attention` collects scores in."""
        return torch.promote_types(self.cache.storage.dtype, torch.float32)

    def _plan(self, rows: int, offset: int | torch.Tensor = 0, reach: int | None = None) -> Pass:
        """Return the plan of a causal chain of `rows` rows, `offset` behind what is committed."""
        return Pass(
            self.cache,
            self.windows,
            self.cache.slots(rows, offset),
            self.cache.seqlens + offset,
            self.cache.capacity if reach is None else reach,
        )

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, plan: Pass) -> torch.Tensor:
        """Return the features [B, T, H] of a pass."""
        output = self.model.base_model(
            input_ids=tokens, position_ids=positions.long(), use_cache=False, specattn_pass=plan
        )
        return output.last_hidden_state


def is_chain(tree: Tree) -> bool:
    """Whether the tree is one path, shared by all requests: causal, and already in order."""
    return tree.batch_size is None and tree.max_depth == tree.size - 1


def _windows(config: PretrainedConfig, capacity: int) -> list[int | None]:
    """Return each layer's sliding window, None where the cache is never longer than it."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= capacity:
        return [None] * config.num_hidden_layers
    if config.model_type in _SLIDES_IN_EVERY_LAYER:  # whatever their config says of layer types
        return [window] * config.num_hidden_layers
    types = config.layer_types
    return [window if layer_type == "sliding_attention" else None for layer_type in types]
