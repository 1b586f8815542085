"""The attention function that transformers calls: it serves a pass over our cache by our kernels.

transformers hands every layer's queries and *new* keys and values to one registered function, and
passes on any extra keyword of the model call. So the whole adapter is that function, and `Pass`,
the plan of the pass, which travels to it as such a keyword.

A model keeps our function once it has it. A call without a plan, from another thread or from a
callback, does what the model's own implementation does: nothing is switched back and forth.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from specattn.decoding.model.structure import ours
from specattn.decoding.passes.attention import HEAD, NO_MASK, Pass
from specattn.decoding.passes.own_layers import attach_layers

_HANDS_OUT = "specattn_hands_out"  # set on hooks
_OVER = "specattn_over_"  # before the name of the implementation that calls without a plan take


class _Over(str):
    """The name of our implementation; a copy or a pickle of a config has the model's own one."""

    own: str

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.own,)


# What models hand down that decides nothing here: positions are in the queries and keys already,
# the cache is our own, and routers are no part of attention.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits"}
)


def attach(model: PreTrainedModel) -> None:
    """Let the model's passes that carry a plan attend through `attention`, now and later.

    Idempotent, and safe while other threads run the model. ValueError: its layers attend otherwise.
    """
    own = model.config._attn_implementation
    attach_layers(model)
    if own.startswith(_OVER):
        return
    # transformers would load an implementation whose name has "flash" in it.
    name = _Over(_OVER + own.replace("/", "_").replace("flash", "fa"))
    name.own = own
    AttentionInterface.register(name, _dispatcher(own))
    if (mask := AttentionMaskInterface().get(own)) is not None:
        AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(
            f"models of type {model.config.model_type!r} are not supported: their layers do not "
            "attend through transformers' AttentionInterface"
        )


def attach_streams(model: PreTrainedModel) -> None:
    """Let the model's layers hand their residual stream to passes that want it; idempotent.

    As `attach` does for attention: a call without a plan does nothing more than before. ValueError:
    the layers are not where transformers' decoders have them.
    """
    base = cast(Any, model.base_model)
    if not isinstance(getattr(base, "layers", None), torch.nn.ModuleList):
        kind = model.config.model_type
        raise ValueError(f"models of type {kind!r} hand out no features of single layers")
    for number, layer in enumerate(base.layers, 1):
        _hand_out(layer, number)


def read_in_call(
    model: PreTrainedModel, tokens: torch.Tensor, plan: Pass, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits, and what the head reads, [B, T, H], of a pass that calls the model itself."""
    _hand_out(model.base_model, HEAD)
    output = cast(Any, model)(**_arguments(tokens, plan), **options)
    return output.logits, plan.streams[HEAD]


def _hand_out(module: torch.nn.Module, number: int) -> None:
    """Let a module give what it returns to passes that want it; once."""
    if any(hasattr(hook, _HANDS_OUT) for hook in module._forward_hooks.values()):
        return

    def hand_out(_: Any, __: Any, options: dict[str, Any], output: Any) -> None:
        plan = options.get("specattn_pass")
        if isinstance(plan, Pass) and (number == HEAD or number in plan.feature_layers):
            plan.streams[number] = output[0] if isinstance(output, (tuple, dict)) else output

    setattr(hand_out, _HANDS_OUT, True)
    module.register_forward_hook(ours(hand_out), with_kwargs=True)


def _dispatcher(own: str) -> Callable:
    """Return what serves passes with a plan, and leaves all others to the implementation `own`."""

    def dispatch(
        module: Any, *tensors: Any, specattn_pass: Pass | Callable | None = None, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        if isinstance(specattn_pass, Pass):
            return attention(module, *tensors, specattn_pass=specattn_pass, **options)
        if specattn_pass is not None:  # another attention for one call (`probe.py`)
            return specattn_pass(module, *tensors, **options)
        implementation = AttentionInterface().get(own, eager_attention(module))
        asked = _Under(module, own) if "flash" in own else module
        return implementation(asked, *tensors, **options)

    return dispatch


class _Under:
    """A layer as it was before `attach`: FlashAttention's adapter asks which version to call."""

    def __init__(self, module: Any, own: str):
        self._module, self.config = module, copy.copy(module.config)
        self.config._attn_implementation_internal = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def eager_attention(module: Any) -> Callable | None:
    """Return the eager attention of a model's layers, which lies beside them."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def read_by_head(model: PreTrainedModel, tokens: torch.Tensor, plan: Pass) -> torch.Tensor:
    """Return what the head reads, [B, T, H], of a pass through the model's own modules."""
    return cast(Any, model.base_model)(**_arguments(tokens, plan)).last_hidden_state


def _arguments(tokens: torch.Tensor, plan: Pass) -> dict[str, Any]:
    """Return what a pass gives the model."""
    given: dict[str, Any] = {"input_ids": tokens, "position_ids": plan.positions}
    return given | {"attention_mask": NO_MASK, "use_cache": False, "specattn_pass": plan}


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    specattn_pass: Pass,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Serve transformers' attention interface: heads before rows coming in, after going out.

    ValueError names a keyword that is not served.
    """
    plan, layer = specattn_pass, module.layer_idx
    if others.keys() - _HARMLESS:
        names = ", ".join(sorted(others.keys() - _HARMLESS))
        raise ValueError(f"attention of layer {layer}: {names} cannot be served")
    if dropout:
        raise ValueError(f"attention of layer {layer}: dropout={dropout} cannot be served")
    if attention_mask is not None and attention_mask.numel():
        raise ValueError(f"attention of layer {layer}: attention_mask cannot be served")
    if not plan.has_window(layer, sliding_window):
        raise ValueError(
            f"attention of layer {layer}: sliding_window={sliding_window} is not what the model's "
            f"config says, {plan.windows[layer]}"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = plan.attend(layer, q, k, v, softmax_scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
    return out, None
