"""Refuses models that compute something else with our attention; asks each once.

No list says which models are taken. One that is new runs some random tokens through its own eager
attention and through ours (`probe.py`); what differs is refused, with the figure and the layer.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import specattn
from specattn.backends.select import chosen
from specattn.decoding.model.families import FAMILIES, check_supported, has_states
from specattn.decoding.model.model import Model
from specattn.decoding.model.text_model import text_model
from specattn.decoding.passes.probe import first_mismatch
from specattn.files import write_atomically

BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of a row of features or logits, relative; what a wrong weight, window or factor does is far more.
Of float64 too models compute a softmax in float32, and states, whose errors add up over a text."""


def prove(model: PreTrainedModel, *, trust_family: bool = False) -> None:
    """Take a model, or say why it cannot be decoded.

    A `Target` does this by itself; before, it shows errors early. What was found is remembered with
    the model, and in the folder that the environment variable ``SPECATTN_CACHE`` names, if it names
    one: for models of the same configuration, shapes and versions of software.

    Parameters
    ----------
    model : PreTrainedModel
    trust_family : bool
        Take models of `FAMILIES` unasked.

    Raises
    ------
    ValueError
        With its own attention and with ours, the model computes something else, or it keeps
        something that this package does not.
    """
    model = text_model(model)
    check_supported(model.config)
    kind, known = ("proved", model.dtype, model.device), Model.of(model)
    if known.knows(kind):
        return
    if not (trust_family and model.config.model_type in FAMILIES):
        note = _note(model)
        if note is None or not note.exists():
            _probe(model)
            if note is not None:
                note.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(note, lambda path: path.write_text(f"{model.config.model_type}\n"))
    known.recall(kind, lambda: True)


def _probe(model: PreTrainedModel) -> None:
    kind, bound = model.config.model_type, BOUNDS[model.dtype]
    if has_states(model.config):
        bound = max(bound, BOUNDS[torch.float32])
    found = first_mismatch(model, bound)
    if found is not None:
        raise ValueError(
            f"models of type {kind!r} are not supported: random tokens through this package's "
            f"attention and through the model's own differ by {found.error:.1e} in their logits "
            f"(at most {bound:.0e} in {model.dtype}), first in {found.where}"
        )


def _note(model: PreTrainedModel) -> Path | None:
    """Return the file that stands for what was found of models such as this one."""
    if not (folder := os.environ.get("SPECATTN_CACHE")) or Model.ranks_of(model) is not None:
        return None  # ranks of one model all ask it, or none
    _, backend = chosen("hybrid_tree_attention", model.device, model.dtype)
    facts = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": model.config.to_dict(),
        "shapes": [(name, list(x.shape)) for name, x in model.named_parameters()],
        "where": [str(model.dtype), model.device.type, backend.name],
        "versions": [specattn.__version__, torch.__version__, transformers.__version__],
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return Path(folder) / "proven" / key
