"""`Model` remembers for one checkpoint, and as long as it lives."""

import gc
import weakref

import torch

from specattn.decoding import generate
from specattn.decoding.methods.auto import Auto
from specattn.decoding.model.model import Model
from tests.decoding.models import prompts, tiny_model

V = 24


def decoded(model, **options):
    method = Auto(remember=True, trained=None)
    settings = {"max_new_tokens": 24, "temperature": 0, **options}
    return generate(model, prompts((20,), vocabulary=V), method, **settings)


def test_each_checkpoint_has_its_own():
    first, second = (tiny_model("qwen3", vocab_size=V) for _ in range(2))
    decoded(first)
    assert Model.of(first) is Model.of(first) is not Model.of(second)
    assert Model.of(first).knows("corpora")
    assert not Model.of(second).knows("corpora")


def test_what_is_remembered_is_made_once():
    known, made = Model(), []
    for _ in range(2):
        assert known.recall(("kind", 3), lambda: made.append(1)) is None
    assert made == [1]


def test_a_checkpoint_that_nobody_holds_is_freed_after_runs_of_it():
    model = tiny_model("qwen3", vocab_size=V)
    decoded(model)
    decoded(model, temperature=1.0, seed=3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_weights_that_their_user_changes_are_read_anew():
    model = tiny_model("qwen3", vocab_size=V)
    before = decoded(model).new_tokens
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    plain = generate(
        model,
        prompts((20,), vocabulary=V),
        "plain",
        max_new_tokens=24,
        temperature=0,
        compile="off",
    )
    assert decoded(model).new_tokens == plain.new_tokens != before
