"""PosS' drafter: EAGLE's layer, once for each few positions of a draft.

A *pair* at position t is the embedding of token t + 1 with the feature of token t, the feature
being what the target's head reads. The drafter predicts features (PosS, section 2)::

    x = fc([embedding of token t + 1; feature of token t])       shared by all specialists
    x += attention(x)                                            causal, over pairs
    x += swiglu(norm(x))                                         x: the feature of token t + 1
    logits of token t + 2 = target's head (x)

EAGLE 3.1 (arXiv 2605.09992) has two more norms, each an option here: ``fc_norm`` of the feature
before ``fc``, and ``norm_output`` of x behind the layer: what it gives is the drafted feature, for
the head and for the next step.

Behind the last verified token the drafter's own features take the place of the target's. A draft's
*depth* counts from its root: at depth 0 a pair has the target's feature. The pair at depth s is
worked on by specialist ``min(s // positions_per_layer, layers - 1)``, with keys and values of its
own for all pairs before (PosS, section 3). With one layer for all positions this is EAGLE-2 or
HASS, which differ in training alone.

Keys and values follow from x alone. So a specialist catches up on pairs that others have worked on
by two projections of what ``fc`` gave, once for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specattn.blocks import TORCH, Ops, Rotation, Store, norm_of, projection, swiglu
from specattn.drafters.layer import LayerConfig, LayerDrafter, check_texts
from specattn.drafters.path_attention import along_paths

Attend = Callable[[torch.Tensor], torch.Tensor]


class PosSConfig(LayerConfig):
    """What a PosS drafter is made of; ``config.json`` of its folder.

    Its fields beside these are `LayerConfig`'s, of each specialist.

    Attributes
    ----------
    layers : int
        Specialists; 1 is EAGLE-2 or HASS.
    positions_per_layer : int
        Depths that each specialist works on, PosS' n; the last one covers all deeper ones.
    fc_bias : bool
        Whether ``fc`` has a bias.
    fc_norm : bool
        Whether features are normed before ``fc``. The drafter's own stand for the target's, so they
        go the same way.
    norm_output : bool
        Whether each specialist norms the features that it drafts.

    Raises
    ------
    ValueError
        A count is not positive, or the rope is not static.
    """

    model_type = "poss"
    shared = ("hidden_size", "vocab_size")

    layers: int = 1
    positions_per_layer: int = 1
    fc_bias: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in ("layers", "positions_per_layer"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def specialist_at(self, depth: int) -> int:
        """Return which specialist works on the pairs at `depth`; the root's is 0."""
        return min(depth // self.positions_per_layer, self.layers - 1)


class PosSDrafter(LayerDrafter):
    """``fc`` and the specialists. Embedding and head are the target's and not part of it.

    `forward` is for whole sequences, as training sees them; decoding calls the parts with an
    attention of its own.

    Parameters
    ----------
    config : PosSConfig
    """

    config: PosSConfig
    config_class = PosSConfig
    title = "PosS"

    def __init__(self, config: PosSConfig):
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.fc_norm = (
            nn.RMSNorm(config.hidden_size, config.rms_norm_eps) if config.fc_norm else None
        )
        self.specialists = nn.ModuleList(Specialist(config) for _ in range(config.layers))
        self.post_init()

    @classmethod
    def for_target(
        cls,
        model: PreTrainedModel,
        *,
        target: str,
        layers: int = 1,
        positions_per_layer: int = 1,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> PosSDrafter:
        """Return a new, random drafter for `model`; see `PosSConfig` for its options.

        `target` is the name or path by which the drafter's folder will know the model.
        """
        config = PosSConfig.for_target(
            model,
            target=target,
            layers=layers,
            positions_per_layer=positions_per_layer,
            fc_norm=fc_norm,
            norm_output=norm_output,
        )
        return cast(Any, cls(config)).to(model.device)

    def forward(
        self, inputs_embeds: torch.Tensor, features: torch.Tensor, depth: int
    ) -> list[torch.Tensor]:
        """Draft `depth` tokens behind every token of whole sequences, along their own text.

        As at inference, a pair sees the target's features up to its root and the drafter's own
        behind it. Those are detached from the specialist that made them, so that each depth's
        gradient stays in its own specialist, and ``fc`` (PosS, section 3).

        `inputs_embeds` and `features`, [B, L, H], are of the same L tokens at positions 0 to L - 1;
        `depth` is from 1 to L - 1 (else ValueError). Entry s of the result, [B, L - 1 - s, H]: row
        t is drafted at depth s behind the root t + 1, and predicts the feature of token
        ``t + s + 1``.
        """
        length, width = inputs_embeds.shape[1], self.config.hidden_size
        check_texts(inputs_embeds, features, depth, width, width)
        places = self.rotated(inputs_embeds, torch.arange(length, device=features.device)[None])
        drafted, pairs, known = list[torch.Tensor](), list[torch.Tensor](), features
        # Of each specialist: keys and values of the pairs at every depth, for all roots.
        seen = [list[tuple[torch.Tensor, torch.Tensor]]() for _ in range(self.config.layers)]
        for step in range(depth):
            roots = length - 1 - step
            pairs.append(fuse(TORCH, self, inputs_embeds[:, step + 1 :], known[:, :roots]))
            layer = self.config.specialist_at(step)
            for s, x in enumerate(pairs[len(seen[layer]) :], len(seen[layer])):
                seen[layer].append(keys_and_values(TORCH, self, layer, x, places.part(s, x)))
            attend = along_paths(seen[layer], roots)
            drafted.append(specialist(TORCH, self, layer, x, places.part(step, x), attend))
            known = drafted[-1].detach()
        return drafted


class Specialist(nn.Module):
    """One decoder layer without an input norm, as EAGLE's."""

    def __init__(self, config: PosSConfig):
        super().__init__()
        width = config.hidden_size
        self.attention = _Attention(config)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(width, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, width, bias=False)
        self.output_norm = nn.RMSNorm(width, config.rms_norm_eps) if config.norm_output else None


class _Attention(nn.Module):
    """The projections around a specialist's attention."""

    def __init__(self, config: PosSConfig):
        super().__init__()
        self.head_dim, eps = config.head_dim, config.rms_norm_eps
        width, heads = config.hidden_size, config.num_attention_heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=config.qkv_bias)
        kv_width = 2 * config.num_key_value_heads * self.head_dim
        self.kv_proj = nn.Linear(width, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps) if config.qk_norm else None


def fuse(
    ops: Ops, drafter: PosSDrafter, embeds: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Return what all specialists read of pairs: all [B, T, H]."""
    if drafter.fc_norm is not None:
        features = ops.norm(features, norm_of(drafter.fc_norm))
    return ops.linear(ops.beside(embeds, features), projection(drafter.fc), keep=True)


def specialist(
    ops: Ops, drafter: PosSDrafter, layer: int, x: torch.Tensor, place: Rotation, attend: Attend
) -> torch.Tensor:
    """Return the features [B, T, H] that a specialist drafts of pairs x [B, T, H], from `fuse`.

    ``attend(q)`` returns [B, T, Hq, D] over this specialist's keys and values of all that these
    pairs see, themselves included; `place` are the pairs' positions.
    """
    own = cast(Any, drafter.specialists[layer])
    attention = own.attention
    heads = ops.linear(x, projection(attention.q_proj)).unflatten(-1, (-1, attention.head_dim))
    norms = norm_of(attention.q_norm), None
    q, _, _ = ops.rotate(heads, heads.shape[2], place, norms=norms)
    x = ops.linear(attend(q).flatten(2), projection(attention.o_proj), residual=x)
    x = swiglu(ops, x, norm_of(own.norm), own.gate_up_proj, own.down_proj)
    return x if own.output_norm is None else ops.norm(x, norm_of(own.output_norm), keep=True)


def keys_and_values(
    ops: Ops,
    drafter: PosSDrafter,
    layer: int,
    x: torch.Tensor,
    place: Rotation,
    store: Store | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values [B, T, Hk, D] of pairs under a specialist; store them."""
    attention = cast(Any, drafter.specialists[layer]).attention
    heads = ops.linear(x, projection(attention.kv_proj)).unflatten(-1, (-1, attention.head_dim))
    norms = None, norm_of(attention.k_norm)
    _, k, v = ops.rotate(heads, 0, place, norms=norms, store=store)
    return k, v
