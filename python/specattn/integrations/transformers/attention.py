"""The attention function that transformers calls under ``attn_implementation="specattn"``."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from specattn.backends.select import chosen

from .masks import Visible, additive, visible_of
from .views import attend

# Arguments without effect here: the mask has the window, the keys the positions.
_HARMLESS = frozenset({
    "cache_position", "deterministic", "is_causal", "labels", "logits_to_keep",
    "num_items_in_batch", "output_attentions", "output_hidden_states", "output_router_logits",
    "position_ids", "return_dict", "sliding_window", "token_type_ids", "use_cache",
})  # fmt: skip

_LATENTS = (
    "a model with latents (MLA) makes keys and values of its whole cache before it asks for "
    "attention; specattn.decoding.generate attends to the latents themselves"
)


@torch.compiler.disable
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Serve transformers' attention interface: [B, heads, T, D] in, [B, T, heads, D] out.

    What the primitives cannot express is left to SDPA, or to the model's own eager attention where
    SDPA cannot express it either; the first time for each reason there is a warning.
    """
    visible = visible_of(attention_mask)
    reason = _why_not(query, key, value, attention_mask, visible, dropout, others)
    if hasattr(module, "kv_a_proj_with_mqa"):
        reason = _LATENTS
    if reason is not None or visible is None:
        _warn(str(reason))
        options = {"scaling": scaling, "dropout": dropout, **others}
        options |= {"softcap": softcap} if softcap is not None else {}
        options |= {"s_aux": s_aux} if s_aux is not None else {}
        return _elsewhere(module, query, key, value, attention_mask, options)
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "window": visible.window}
    q, k, v = (_rows(x) for x in (query, key, value))
    return attend(q, k, v, visible, s_aux, options), None


def _why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    visible: Visible | None,
    dropout: float,
    others: dict[str, Any],
) -> str | None:
    """Return why the primitives cannot serve a call, or None."""
    unknown = [name for name in others if others[name] is not None and name not in _HARMLESS]
    if unknown:
        return f"{', '.join(sorted(unknown))} cannot be expressed"
    if others.get("output_attentions"):
        return "output_attentions=True needs weights, which no kernel of ours returns"
    if dropout:
        return f"dropout={dropout} cannot be expressed"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return "a gradient is recorded; where none is wanted, call under torch.no_grad()"
    if attention_mask is None:
        return "there is no mask, so attention is bidirectional"
    if visible is None:
        return "the mask is neither causal nor a causal window, or has holes"
    batch = len(query) if visible.spans is None else len(visible.spans)
    if (len(query), query.shape[2]) != (batch, visible.rows):
        return "the mask is of another batch or number of rows"
    return _unserved(query.shape[-1], value.shape[-1], query.device, query.dtype)


@functools.cache
def _unserved(
    head_dim: int, value_dim: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why no kernel takes such heads on this device, or None."""
    if head_dim != value_dim or head_dim % 8 or head_dim > 256:
        return f"heads of {head_dim} with values of {value_dim}, not both a multiple of 8 up to 256"
    try:
        chosen("hybrid_tree_attention", device, dtype)
    except RuntimeError as error:
        return str(error)
    return None


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(
        f'attn_implementation="specattn" leaves some attention to transformers: {reason}',
        stacklevel=2,
    )


def _elsewhere(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend by SDPA, or by the model's eager attention where only that can."""
    visible = visible_of(attention_mask)
    # Models keep their eager attention beside their layers, and not in the interface.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    needs = options.keys() & {"softcap", "s_aux"} or options.get("output_attentions")
    if eager is not None and needs:
        dense = visible.dense(eager_mask) if visible else additive(attention_mask, query.dtype)
        return eager(module, query, key, value, dense, **options)
    dense = visible.dense(sdpa_mask) if visible else attention_mask
    return AttentionInterface()["sdpa"](module, query, key, value, dense, **options)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return [B, heads, n, D] with rows before heads and whole rows, as the primitives read it."""
    return (x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2)
