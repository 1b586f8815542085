"""Layers that a pass runs in place of their modules: those with a state, and those with latents."""

from __future__ import annotations

from types import MethodType
from typing import Any

from transformers import PreTrainedModel

from specattn.decoding.model.latents import Latents, latent_layers, latent_modules
from specattn.decoding.model.recurrent import GatedDelta, state_layers, state_modules
from specattn.decoding.model.structure import ours


def own_layers(model: PreTrainedModel) -> dict[int, GatedDelta | Latents]:
    """Return the weights of these layers by number; raises `Unrecognised`."""
    return {**state_layers(model), **latent_layers(model)}


def attach_layers(model: PreTrainedModel) -> None:
    """Let passes that carry a plan run these layers; idempotent.

    As `attach` does for attention: a call without a plan does what the module does by itself.
    ValueError: something else has replaced a module's ``forward``.
    """
    for kept, modules in (("a state", state_modules(model)), ("latents", latent_modules(model))):
        for n, module in modules.items():
            now = getattr(vars(module).get("forward"), "__func__", None)
            if "forward" in vars(module) and now not in (forward, type(module).forward):
                raise ValueError(f"layer {n} keeps {kept}, and its forward was replaced")
            if now is not forward:  # of an unpickled model it is the class's own
                module.forward = MethodType(forward, module)


@ours
def forward(module: Any, hidden_states: Any, *, specattn_pass: Any = None, **options: Any) -> Any:
    """Run a layer's module, or what a pass or a probe has in its place."""
    if specattn_pass is not None:
        return specattn_pass.run_layer(module, hidden_states, options)
    return type(module).forward(module, hidden_states, **options)
