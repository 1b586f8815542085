"""Fields of models' configurations that are null, missing or something else, before or after.

Each gives transformers' text of a fresh model that was configured alike, or an error that names the
field. What transformers itself cannot build is no model.
"""

import copy
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from specattn.decoding import generate
from tests.decoding.models import (
    CONFIGS,
    SHAPE,
    decisive,
    greedy_by_transformers,
    prompts,
    tiny_model,
)
from tests.hostile.fields import MISSING, WRONG, edited

NEW_TOKENS = 8
TEXT = prompts([24], vocabulary=64)[0]
SIZES = {
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
}
FIELDS = [
    *sorted(SIZES),
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "rope_parameters",
    "rope_parameters.rope_theta",
    "rope_parameters.rope_type",
    "rope_theta",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
    "max_position_embeddings",
    "model_type",
    "num_kv_shared_layers",
]
ALSO = {  # fields that follow from others, which transformers has forgotten once a model is made
    "use_sliding_window": "sliding_window",
}
NO_NUMBERS = "NaN among their logits"  # that transformers takes the largest of


def built(family, field, value):
    """Return a model that transformers builds with another field, None where it does not."""
    kind, own = CONFIGS[family]
    config = edited(kind(**{**SHAPE, **own}).to_dict(), tuple(field.split(".")), value)
    if field in SIZES and isinstance(value, int) and value > 10**6:
        return None  # nobody has the memory
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(kind.from_dict(config), dtype=torch.float32)
        return decisive(model.eval())
    except Exception:
        return None


def edit(model, field, value):
    """Edit the configuration of a model; return whether the configuration takes that."""
    *above, name = field.split(".")
    try:
        where = model.config.rope_parameters if above else vars(model.config)
        if value is MISSING:
            where.pop(name, None)
        elif above:
            where[name] = copy.deepcopy(value)
        else:
            setattr(model.config, name, copy.deepcopy(value))
    except Exception:
        return False
    return True


def outcome(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return run()
        except Exception as error:
            return error


def by_transformers(model):
    return outcome(lambda: greedy_by_transformers(model, TEXT, NEW_TOKENS))


def fault(model, expected, field):
    """Return what is wrong with the outcome for `model`, given transformers' for the same one."""
    found = outcome(lambda: generate(model, TEXT, "suffix", max_new_tokens=NEW_TOKENS))
    if not isinstance(found, Exception):
        return "" if found.new_tokens == [expected] else f"{found.new_tokens[0]}, not {expected!r}"
    said, name = str(found), field.rpartition(".")[2]
    names = name in said or ALSO.get(name, name) in said
    named = isinstance(found, (ValueError, TypeError)) and "NoneType" not in said
    return "" if named and (names or NO_NUMBERS in said) else f"{found!r:.300}; {expected!r:.100}"


def cases():
    quick = {("llama", "sliding_window"), ("qwen3-sliding", "layer_types"), ("llama", "head_dim")}
    for family in ("llama", "qwen3-sliding"):
        for field in FIELDS:
            marks = () if (family, field) in quick else pytest.mark.slow
            yield pytest.param(family, field, marks=marks)


@pytest.mark.parametrize(("family", "field"), list(cases()))
def test_a_model_that_was_built_so(family, field):
    faults = {}
    for how, value in WRONG.items():
        model = built(family, field, value)
        if model is not None:
            faults[how] = fault(model, by_transformers(built(family, field, value)), field)
    assert not any(faults.values()), faults


@pytest.mark.parametrize(("family", "field"), list(cases()))
def test_a_model_whose_configuration_is_edited_later(family, field):
    """Before any run, and after one."""
    faults = {}
    for how, value in WRONG.items():
        same = tiny_model(family)
        if not edit(same, field, value):
            continue
        expected = by_transformers(same)
        for first in (False, True):
            model = tiny_model(family)
            if first:
                generate(model, TEXT, "suffix", max_new_tokens=NEW_TOKENS)
            assert edit(model, field, value)
            faults[how, first] = fault(model, expected, field)
    assert not any(faults.values()), faults
