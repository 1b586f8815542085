"""The target: an ordinary Hugging Face causal model whose attention runs on our cache and kernels.

transformers hands every layer's queries and *new* keys and values to one registered function, and
passes on any extra keyword of the model call. So the whole adapter is that function, which writes
the new rows into our cache and calls one primitive, and `Pass`, the plan that tells it how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Selection(NamedTuple):
    """The cached tokens that one sparse pass reads in every full-attention layer.

    Attributes
    ----------
    indices : Tensor, int32 [full layers, B, W]
        Positions in ascending order.
    lengths : Tensor, int32 [B]
        How many of them count.
    """

    indices: torch.Tensor
    lengths: torch.Tensor


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
    scores : Tensor, float32 [full layers, B, N], or None
        Filled with how much first and last row care about each prefix token.
    selection : Selection or None
        What full-attention layers read instead of the whole cache.
    """

    cache: KVCache
    windows: list[int | None]
    slots: tuple[torch.Tensor, torch.Tensor]
    prefix: torch.Tensor
    reach: int
    tree_mask: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    selection: Selection | None = None

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
        full_layer = sum(before is None for before in self.windows[:layer])
        options: dict[str, Any] = {"softmax_scale": softmax_scale, "sinks": sinks}
        if self.selection is not None and window is None:
            indices, lengths = self.selection.indices[full_layer], self.selection.lengths
            out, _ = sparse_gather_attention(q, k_cache, v_cache, indices, lengths, **options)
            return out
        tree = (q, k_cache, v_cache, self.prefix, None, None, self.tree_mask)
        if self.scores is not None and window is None:
            out, _, per_head = verify_attention(*tree, collect="scores", **options)
            self.scores[full_layer] = per_head.mean(1)
            return out
        out, _ = hybrid_tree_attention(*tree, window=window, **options)
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
        self.model.set_attn_implementation(_ATTENTION)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def prefill(
        self,
        prompts: Sequence[torch.Tensor],
        chunk_size: int,
        on_chunk: Callable[[int, int], None] | None = None,
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
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        total, longest = sum(map(len, prompts)), max(map(len, prompts))
        padded = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True).to(self.device)
        for start in range(0, longest, chunk_size):
            if on_chunk is not None:
                on_chunk(sum(min(len(prompt), start) for prompt in prompts), total)
            end = min(start + chunk_size, longest)
            plan = self._plan(rows=end - start, reach=end)
            self._run(self.model.base_model, padded[:, start:end], plan.slots[1], plan)
            self.cache.seqlens = lengths.clamp(max=end).to(torch.int32)
        if on_chunk is not None:
            on_chunk(total, total)

    def verify(
        self, tree: Tree, tokens: torch.Tensor, *, collect: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a tree behind what is committed; its keys stay there until the next pass.

        Parameters
        ----------
        tree : Tree
        tokens : Tensor, int64 [B, T]
        collect : bool
            Also hand out how much the first and the last row care about the prefix
            ("Collect-2-Query", Vegas §3.3).

        Returns
        -------
        logits : Tensor [B, T, V]
        scores : Tensor, float32 [full layers, B, N], or None
            Mean logit over both rows and all heads; -inf beyond the prefix.
        """
        plan = self._plan(rows=tree.size)
        if not is_chain(tree):
            plan.tree_mask = tree.packed_mask
        if collect:
            shape = (self.full_layers, self.cache.batch_size, self.cache.capacity)
            plan.scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        positions = self.cache.seqlens[:, None] + tree.depths
        return self._run(self.model, tokens, positions, plan).logits, plan.scores

    def draft(self, tokens: torch.Tensor, offset: int, selection: Selection) -> torch.Tensor:
        """Run one token per request, `offset` behind what is committed, on selected tokens only.

        Returns
        -------
        Tensor [B, 1, V]
            Logits of the token that follows.
        """
        plan = self._plan(rows=1, offset=offset)
        plan.selection = selection
        return self._run(self.model, tokens, plan.slots[1], plan).logits

    def _plan(self, rows: int, offset: int = 0, reach: int | None = None) -> Pass:
        """Return the plan of a causal chain of `rows` rows, `offset` behind what is committed."""
        return Pass(
            self.cache,
            self.windows,
            self.cache.slots(rows, offset),
            self.cache.seqlens + offset,
            self.cache.capacity if reach is None else reach,
        )

    def _run(
        self, model: torch.nn.Module, tokens: torch.Tensor, positions: torch.Tensor, plan: Pass
    ) -> Any:
        return model(
            input_ids=tokens, position_ids=positions.long(), use_cache=False, specattn_pass=plan
        )


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
