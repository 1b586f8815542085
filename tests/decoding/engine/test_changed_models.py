"""A model that was changed between runs, or one of several: nothing of before is read."""

import gc
import weakref

import pytest
import torch

from specattn.decoding import release
from tests.decoding.engine.test_workspace import kept, texts_of
from tests.decoding.models import tiny_model


def scale_in_place(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1.0)


def scale_data(model):
    model.model.layers[1].mlp.down_proj.weight.data.mul_(-1.0)


def scale_norm(model):
    model.model.layers[1].input_layernorm.weight.data.add_(-3.0)


def replace_weight(model):
    own = model.model.layers[1].mlp.down_proj
    own.weight = torch.nn.Parameter(-own.weight.detach())


def add_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: -out)


def replace_forward(model):
    mlp = model.model.layers[1].mlp
    mlp.act_fn = torch.nn.Tanh()


def turn_faster(model):
    model.model.rotary_emb.inv_freq.mul_(40.0)


CHANGES = [
    scale_in_place,
    scale_data,
    scale_norm,
    replace_weight,
    add_hook,
    replace_forward,
    turn_faster,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_model_that_was_changed_is_read_anew(family, change):
    """Whether recordings read a weight where it lies, or what is computed of it beforehand."""
    model, other = tiny_model(family), tiny_model(family)
    before = texts_of(model)
    change(model)
    change(other)
    expected = texts_of(other)
    assert expected != before
    assert texts_of(model) == expected


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_captured_model_that_was_changed_is_read_anew(change, captured):
    model, other = tiny_model(), tiny_model()
    texts_of(model, max_new_tokens=8)
    change(model)
    change(other)
    assert texts_of(model, max_new_tokens=8) == texts_of(other, max_new_tokens=8)


def to_other_memory(model):
    """Move weights and buffers, as to another GPU; where they lay is something else now."""
    for x in (*model.parameters(), *model.buffers()):
        before = x.data
        x.data = before.clone()
        if before.is_floating_point():
            before.fill_(torch.nan)


def to_bfloat16(model):
    model.bfloat16()


def compile_in_place(model):
    model.compile(backend="eager")


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


MOVES = [to_other_memory, to_bfloat16, compile_in_place, compile_forward]


@pytest.mark.parametrize(
    ("change", "method"),
    [
        (to_other_memory, "vegas"),
        *((change, "plain") for change in MOVES),
        *(pytest.param(change, "vegas", marks=pytest.mark.slow) for change in MOVES[1:]),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_captured_model_that_was_moved_converted_or_compiled_is_captured_anew(
    change, method, captured, recordings
):
    """No graph that reads what is no longer the model's is left."""
    model, other = tiny_model(), tiny_model()
    texts_of(model, method)
    before = weakref.ref(kept(model).runner)
    count = len(recordings)
    change(model)
    change(other)
    found = texts_of(model, method)
    assert len(recordings) > count
    gc.collect()
    assert before() is None
    assert found == texts_of(other, method)


def test_captured_models_on_one_gpu_disturb_no_other(captured, recordings):
    """Their runs take turns; each has memory and graphs of its own, which outlive the other's."""
    models = [tiny_model("llama"), tiny_model("qwen3"), tiny_model("llama")]
    with torch.no_grad():
        for x in models[2].parameters():
            x.neg_()
    expected = [texts_of(model, "suffix") for model in models]
    for model in models:
        release(model)
    for _ in range(3):
        assert [texts_of(model, "suffix") for model in models] == expected
    count = len(recordings)
    release(models[0])
    del models[0]
    gc.collect()
    assert [texts_of(model, "suffix") for model in models] == expected[1:]
    assert len(recordings) == count
