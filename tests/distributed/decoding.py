"""What ranks run in the tests of decoding."""

import functools

import torch
import torch.distributed as dist
import transformers

from specattn.decoding import METHODS, generate
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.distributed import ContextParallel
from tests.decoding.models import prompts, tiny_model
from tests.decoding.settings import settings_of, settings_without_layers

LENGTHS, NEW_TOKENS = (5, 23, 40), 24


def _run(model, whole, name, shared, **options):
    """Return the texts of one method whose drafter is made for the model as it is whole."""
    fused = whole.config.model_type == "phi3"  # no drafter has such a layer
    settings = (settings_without_layers if fused else settings_of)(whole)
    output = generate(
        model,
        prompts(LENGTHS),
        settings[name],
        max_new_tokens=NEW_TOKENS,
        context_parallel=shared,
        **options,
    )
    return output.new_tokens


def texts(families, names, block_size, options=None):
    """Return the texts of methods by family and name, on one rank (`block_size` None) or on all."""
    shared = None if block_size is None else ContextParallel(block_size=block_size)
    found = {}
    for family in families:
        model = tiny_model(family)
        for name in names:
            found[family, name] = _run(model, model, name, shared, **options or {})
    return found


def saved(family, folder, **options):
    """Save a tiny model, for ranks to load parts of it."""
    tiny_model(family, **options).save_pretrained(folder)
    return folder


@functools.cache
def _columns(parts):
    """Return the group of the ranks that hold the same of `parts` parts of a model."""
    size = dist.get_world_size()
    if parts == size:
        return None
    mesh = dist.init_device_mesh(
        "cpu", (size // parts, parts), mesh_dim_names=("context", "tensor")
    )
    return mesh["context"].get_group()


def loaded(folder, parts=1):
    """Return a saved model, or this rank's part of it."""
    transformers.logging.disable_progress_bar()
    model = load_causal_model(folder, torch.float32, tensor_parallel=parts)
    model.generation_config.eos_token_id = None
    return model


def texts_of_whole(folder, names, options=None):
    """Return the texts of methods by name, of a saved model on one rank."""
    model = loaded(folder)
    return {name: _run(model, model, name, None, **options or {}) for name in names}


def texts_of_parts(folder, names, parts, block_size, options=None):
    """Return the texts of methods by name, the saved model divided into `parts`.

    Of more ranks those that hold the same part share the cache.
    """
    model, whole, columns = loaded(folder, parts), loaded(folder), _columns(parts)
    shared = None if columns is None else ContextParallel(columns, block_size=block_size)
    return {name: _run(model, whole, name, shared, **options or {}) for name in names}


def vegas_per_head(block_size, kv_dtype):
    """Return the texts and the accepted lengths of Vegas whose KV heads select by themselves.

    What is accepted depends on what is selected, so equal lengths are equal selections.
    """
    model = tiny_model("qwen3")
    shared = None if block_size is None else ContextParallel(block_size=block_size)
    method = METHODS["vegas"](gamma=4, ratio=0.3, min_tokens=2, per_head=True, switch=False)
    lengths = prompts((5, 23, 40))
    options = {"context_parallel": shared, "kv_dtype": kv_dtype}
    output = generate(model, lengths, method, max_new_tokens=NEW_TOKENS, **options)
    accepted = [[one.tokens for one in r.history] for r in output.statistics.requests]
    return output.new_tokens, accepted
