"""What is remembered about a checkpoint: its own, no longer than it lives, and true of it."""

import gc
import weakref

import pytest
import torch

from specattn.decoding import generate
from specattn.decoding.methods.auto import Auto
from specattn.decoding.model.model import Model
from specattn.decoding.passes import proving
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

TEXTS = prompts([5, 19])
AUTO = Auto(remember=True, trained=None)
LOOKING = ["plain", AUTO, "suffix", "vegas", "token_recycling"]


@pytest.fixture
def probed(monkeypatch):
    """Return the models that were probed, in order."""
    probes, first_mismatch = [], proving.first_mismatch

    def noting(model, bound):
        probes.append((id(model), model.dtype))
        return first_mismatch(model, bound)

    monkeypatch.setattr(proving, "first_mismatch", noting)
    return probes


def assert_right(model):
    output = generate(model, TEXTS, AUTO, max_new_tokens=12, temperature=0)
    assert output.new_tokens == [greedy_by_transformers(model, p, 12) for p in TEXTS]


def test_something_is_made_once_for_each_checkpoint():
    first, second = tiny_model(), tiny_model()
    made = []
    for model in (first, second, first):
        Model.of(model).recall("kind", lambda: made.append(None))
    assert len(made) == 2
    assert Model.of(first) is Model.of(first) is not Model.of(second)
    assert Model.of(first).knows("kind")
    assert not Model.of(first).knows("other")


def test_two_models_are_asked_once_each(probed):
    models = [tiny_model("qwen3"), tiny_model("llama", seed=1)]
    for _ in range(2):
        for model in models:
            assert_right(model)
    assert probed == [(id(model), torch.float32) for model in models]
    other = tiny_model()
    assert Model.of(models[0]).knows("corpora")
    assert not Model.of(other).knows("corpora")


@pytest.mark.parametrize("method", LOOKING, ids=str)
def test_a_deleted_model_leaves_nothing_behind(method):
    model = tiny_model()
    generate(model, TEXTS, method, max_new_tokens=12)
    gone = [weakref.ref(model), weakref.ref(model.lm_head.weight), weakref.ref(Model.of(model))]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_weights_that_their_user_changes_are_read_anew(probed):
    """In place, by another parameter, and in another dtype, which is asked again."""
    model, other = tiny_model("qwen3"), tiny_model("qwen3", seed=7)
    assert_right(model)
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        own.data.copy_(theirs)
    assert_right(model)
    layer = model.model.layers[0].mlp
    layer.down_proj.weight = torch.nn.Parameter(layer.down_proj.weight.detach() * 2)
    assert_right(model)
    assert len(probed) == 1
    model.double()
    assert_right(model)
    assert [dtype for _, dtype in probed] == [torch.float32, torch.float64]
