"""EAGLE-3's drafter: one layer on features of several layers of the target, with a head of its own.

A *pair* at position t is the embedding e of token t + 1 with a hidden state g of the drafter's own
width, which is made of the target's features of token t. *A target's features* are its residual
stream behind some layers, by default a low, a middle and a high one, side by side (EAGLE-3, arXiv
2503.01840, section 3.1)::

    g = fc([h_low; h_middle; h_high])                            of token t
    a = g + attention([norm(e); norm(g)])                        causal, over pairs
    a += swiglu(norm(a))
    logits of token t + 2 = lm_head(norm(a))                     over the drafter's own vocabulary

Behind the last verified token g is the a of the pair before. The head may know some of the target's
tokens only: entry d of its logits is of the target's token ``d + d2t[d]``.

EAGLE 3.1 (arXiv 2605.09992) and others have more norms, each an option of `Eagle3Config`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specattn.blocks import TORCH, Ops, Rotation, Store, norm_of, projection
from specattn.drafters.drafter import Found
from specattn.drafters.eagle3_config import Eagle3Config, usual_layers
from specattn.drafters.eagle3_folders import read_folder
from specattn.drafters.layer import DecoderLayer, LayerDrafter, check_texts
from specattn.drafters.path_attention import along_paths

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``attend(q, k, v)``: outputs [B, T, Hq, D] of pairs over all that they see."""


class Eagle3Drafter(LayerDrafter):
    """``fc``, the layer and the head; modules are named as in SafeAILab's and SGLang's folders.

    `forward` is for whole sequences, as training sees them; decoding calls the parts with an
    attention of its own.

    Parameters
    ----------
    config : Eagle3Config
    """

    config: Eagle3Config
    config_class = Eagle3Config
    title = "EAGLE-3"
    d2t: torch.Tensor | None

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        width, wide, eps = config.hidden_size, config.feature_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.input_norm = nn.RMSNorm(config.features * wide, eps) if config.norm_before_fc else None
        each = (nn.RMSNorm(wide, eps) for _ in range(config.features))
        self.fc_norm = nn.ModuleList(each) if config.fc_norm else None
        self.fc = nn.Linear(config.features * wide, width, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.head_size, bias=False)
        none = torch.zeros(config.head_size, dtype=torch.int64)
        self.register_buffer("d2t", none if config.head_size < config.vocab_size else None)
        self.post_init()

    @classmethod
    def read(cls, folder: Path) -> Found:
        """Return what a folder holds of a published layout (`layouts`), or of our own."""
        return read_folder(folder) or super().read(folder)

    @classmethod
    def for_target(
        cls,
        model: PreTrainedModel,
        *,
        target: str,
        feature_layers: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        token_heads: int = 0,
        norm_before_residual: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> Eagle3Drafter:
        """Return a new, random drafter for `model`; see `Eagle3Config` for its options.

        `target` is the name or path by which the drafter's folder will know the model.
        `token_heads` are heads of keys and values, with as many queries each as the target's,
        beside those of the shape of its last layer.
        """
        depth = model.config.num_hidden_layers
        config = Eagle3Config.for_target(
            model,
            target=target,
            feature_layers=list(usual_layers(depth) if feature_layers is None else feature_layers),
            draft_vocab_size=draft_vocab_size,
            norm_before_residual=norm_before_residual,
            fc_norm=fc_norm,
            norm_output=norm_output,
        )
        group = config.num_attention_heads // config.num_key_value_heads
        config.num_key_value_heads += token_heads
        config.num_attention_heads += group * token_heads
        config.check_target(model.config)
        return cast(Any, cls(config)).to(model.device)

    @property
    def tokens(self) -> torch.Tensor | None:
        """The target's token of each of the head's, int64 [draft_vocab_size]; None: the same."""
        if self.d2t is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def forward(
        self, inputs_embeds: torch.Tensor, features: torch.Tensor, depth: int
    ) -> list[torch.Tensor]:
        """Draft `depth` tokens behind every token of whole sequences, along their own text.

        So it is trained as it is used: from the second step on it reads what it has made itself
        (EAGLE-3's training-time test), and gradients go all the way back. As at inference, a pair
        sees the target's features up to its root and the drafter's own hidden states behind it.

        `inputs_embeds`, [B, L, H], and `features`, [B, L, layers * width], are of the same L tokens
        at positions 0 to L - 1; `depth` is from 1 to L - 1 (else ValueError). Entry s of the
        result, [B, L - 1 - s, H]: row t is drafted at depth s behind the root t + 1, and
        `logits_of` makes of it those of token ``t + s + 2``.
        """
        config, length = self.config, inputs_embeds.shape[1]
        wide = config.features * config.feature_size
        if config.window is not None and length > config.window:
            raise ValueError(f"texts of {length} tokens are longer than the window {config.window}")
        check_texts(inputs_embeds, features, depth, config.hidden_size, wide)
        places = self.rotated(inputs_embeds, torch.arange(length, device=features.device)[None])
        drafted, known = list[torch.Tensor](), fused(TORCH, self, features)
        seen = list[tuple[torch.Tensor, torch.Tensor]]()  # keys and values of pairs at every depth

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen.append((k, v))
            return along_paths(seen, q.shape[1])(q)

        for step in range(depth):
            pairs = pair(TORCH, self, inputs_embeds[:, step + 1 :], known[:, : length - 1 - step])
            known = layer(TORCH, self, pairs, places.part(step, pairs), attend)
            drafted.append(known)
        return drafted


class _Layer(DecoderLayer):
    """A decoder layer whose attention reads two rows side by side, the second with its own norm."""

    def __init__(self, config: Eagle3Config):
        super().__init__(config, read=2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


def fused_input(ops: Ops, drafter: Eagle3Drafter, features: torch.Tensor) -> torch.Tensor:
    """Return what ``fc`` reads of the target's features [B, T, layers * width]."""
    if drafter.input_norm is not None:
        features = ops.norm(features, norm_of(drafter.input_norm))
    if drafter.fc_norm is not None:
        width = drafter.config.feature_size
        norms = [(width, norm_of(norm)) for norm in cast(Any, drafter.fc_norm)]
        features = ops.norm_parts(features, *norms)
    return features


def fused(ops: Ops, drafter: Eagle3Drafter, features: torch.Tensor) -> torch.Tensor:
    """Return g [B, T, H] of the target's features [B, T, layers * width]."""
    return ops.linear(fused_input(ops, drafter, features), projection(drafter.fc), keep=True)


def pair(ops: Ops, drafter: Eagle3Drafter, embeds: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return pairs [B, T, 3 H] of embeddings and hidden states, both [B, T, H].

    Both normed, side by side, as the attention reads them, and the residual stream.
    """
    own, width = cast(Any, drafter.midlayer), embeds.shape[-1]
    norms = [norm_of(norm) for norm in (own.input_layernorm, own.hidden_norm)]
    read = ops.norm_parts(ops.beside(embeds, g), *((width, norm) for norm in norms))
    if drafter.config.norm_before_residual:
        g = ops.norm(g, norms[1])
    return ops.beside(read, g)


def layer(
    ops: Ops,
    drafter: Eagle3Drafter,
    pairs: torch.Tensor,
    place: Rotation,
    attend: Attend,
    store: Store | None = None,
) -> torch.Tensor:
    """Return the hidden states a [B, T, H] that the layer makes of pairs; store keys and values.

    `pairs` [B, T, 3 H] are `pair`'s, `place` their positions.
    """
    own = cast(Any, drafter.midlayer)
    read, residual = _parts(drafter, pairs)
    attention, mlp = own.self_attn, own.mlp
    parts = (projection(x) for x in (attention.q_proj, attention.k_proj, attention.v_proj))
    heads = ops.linear(read, *parts).unflatten(-1, (-1, drafter.config.head_dim))
    norms = norm_of(attention.q_norm), norm_of(attention.k_norm)
    q_heads = drafter.config.num_attention_heads
    out = attend(*ops.rotate(heads, q_heads, place, norms=norms, store=store)).flatten(2)
    x = ops.linear(out, projection(attention.o_proj), residual=residual)
    gate_up = projection(mlp.gate_proj), projection(mlp.up_proj)
    inner = ops.linear(ops.norm(x, norm_of(own.post_attention_layernorm)), *gate_up, gate="silu")
    x = ops.linear(inner, projection(mlp.down_proj), residual=x)
    if drafter.config.norm_output:
        return ops.norm(x, norm_of(drafter.norm), keep=True)
    return x


def keys_and_values(
    ops: Ops, drafter: Eagle3Drafter, pairs: torch.Tensor, place: Rotation, store: Store
) -> None:
    """Store the keys and values of pairs, without drafting from them."""
    attention = cast(Any, drafter.midlayer).self_attn
    parts = projection(attention.k_proj), projection(attention.v_proj)
    heads = ops.linear(_parts(drafter, pairs)[0], *parts).unflatten(
        -1, (-1, drafter.config.head_dim)
    )
    ops.rotate(heads, 0, place, norms=(None, norm_of(attention.k_norm)), store=store)


def _parts(drafter: Eagle3Drafter, pairs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what the attention reads of pairs, [B, T, 2 H], and the residual stream."""
    width = drafter.config.hidden_size
    return pairs.split([2 * width, width], -1)


def head_rows(ops: Ops, drafter: Eagle3Drafter, x: torch.Tensor) -> torch.Tensor:
    """Return what the head reads of hidden states a [B, T, H]."""
    return x if drafter.config.norm_output else ops.norm(x, norm_of(drafter.norm))


def logits_of(ops: Ops, drafter: Eagle3Drafter, x: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, T, draft_vocab_size] of hidden states a [B, T, H]."""
    return ops.head(head_rows(ops, drafter, x), drafter.lm_head)
