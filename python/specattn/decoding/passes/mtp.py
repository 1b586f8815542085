"""What an MTP head computes, as functions of `ops`: a layer as its model's, over pairs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.blocks import TORCH, Ops, Place, Rotation, Store, angle_tables
from specattn.decoding.model.mtp import MtpHead
from specattn.decoding.passes.decoder import Attend, entered, rotated, run_layer, stored

_ROWS = 9  # that a layer is compared over
_BOUNDS = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative; 1e-4 of more bits


def fuse(ops: Ops, head: MtpHead, embeddings: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return what the layer reads of pairs: all [B, T, H]."""
    embeddings = ops.norm(embeddings, head.embedding_norm, keep=True)
    features = ops.norm(features, head.feature_norm)
    pair = (features, embeddings) if head.feature_first else (embeddings, features)
    return ops.linear(ops.beside(*pair), head.project, keep=True)


def drafted(ops: Ops, head: MtpHead, x: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Return the features [B, T, H] that are drafted of pairs, from `fuse`."""
    x = run_layer(ops, 0, head.layer, x, attend, _no_state)
    return ops.norm(x, head.norm, keep=True)


def remember(ops: Ops, head: MtpHead, x: torch.Tensor, place: Rotation, store: Store) -> None:
    """Store the keys and values of pairs, from `fuse`."""
    read = entered(ops, head.layer.around_attention, x)
    stored(ops, head.attention, read, head.head_dim, place, store)


def angles(
    head: MtpHead, like: torch.Tensor, positions: int, longest: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the head's rope by position, as `angle_tables` does."""
    rope = head.attention.rope
    if rope is None or head.rotary is None:
        still = torch.ones(max(positions, 2), 1, device=like.device, dtype=torch.float32)
        return still, torch.zeros_like(still)
    kind = [rope] if rope else []
    return angle_tables(head.rotary, like, positions, *kind, longest=longest)


def _no_state(n: int) -> Any:
    raise AssertionError("an MTP layer keeps no state")


@torch.no_grad()
def prove_head(head: MtpHead, model: PreTrainedModel) -> MtpHead:
    """Return a head whose layer computes by our equations what transformers' module does.

    As of models, what differs is refused: ValueError.
    """
    assert head.module is not None
    width, dtype = head.project.weight.shape[0], head.project.weight.dtype
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _ROWS, width, generator=generator, dtype=torch.float32, device="cpu").to(
        model.device, dtype
    )
    start = torch.zeros(1, dtype=torch.int32, device=model.device)
    steps = torch.arange(_ROWS, dtype=torch.int32, device=model.device)[None]
    place = Place(*angles(head, x, _ROWS), start, steps)

    def attend(n: int, weights: Any, read: torch.Tensor) -> torch.Tensor:
        q, k, v = rotated(TORCH, weights, read, head.head_dim, place, None)
        return TORCH.hybrid_tree_attention(q, k, v, start, None, None, **head.logits)

    found = run_layer(TORCH, 0, head.layer, x, attend, _no_state)
    kind = [head.attention.rope] if head.attention.rope else []
    turned = None if head.rotary is None else head.rotary(x, steps.long(), *kind)
    mask = torch.full((_ROWS, _ROWS), torch.finfo(dtype).min, dtype=dtype, device=model.device)
    given: Any = {"attention_mask": mask.triu(1)[None, None], "position_ids": steps.long()}
    out = head.module(x, position_embeddings=turned, **given)
    expected = out[0] if isinstance(out, tuple) else out
    error = float((found - expected).double().norm() / (expected - x).double().norm())
    if not error <= _BOUNDS.get(dtype, 1e-4):
        raise ValueError(
            f"the MTP layer of models of type {model.config.model_type!r} is not supported: by "
            f"this package's equations and by the model's own module it differs by {error:.1e}"
        )
    return head
