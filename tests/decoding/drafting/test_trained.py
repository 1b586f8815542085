"""Drafters given by their folders: loaded once for a model, silently, until their files change."""

import gc
import weakref

import pytest
import torch
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers.utils import logging

from specattn.decoding import Eagle3, LongSpec, Medusa, Mtp, PosS, TokenSwift, TriForce, generate
from specattn.decoding.methods import triforce
from specattn.drafters import MedusaHeads
from specattn.drafters.drafter import TrainedDrafter
from tests.decoding.models import tiny_model

TRAINED = [Eagle3, LongSpec, Medusa, Mtp, PosS, TokenSwift]


def saved(kind, model, folder, **own):
    """Write a new drafter of a method's kind for `model`."""
    if kind is Eagle3:
        own |= {"feature_layers": [1, 2, 3]}
    drafter = kind.kind.for_target(model, target="tiny", **own)
    drafter.save_pretrained(folder)
    return drafter


@pytest.fixture
def loads(monkeypatch):
    """Return the folders that drafters are read from, in order."""
    found, read = [], TrainedDrafter.of_found.__func__

    def noting(cls, folder, *others):
        found.append(str(folder))
        return read(cls, folder, *others)

    monkeypatch.setattr(TrainedDrafter, "of_found", classmethod(noting))
    return found


@pytest.mark.parametrize("kind", TRAINED)
def test_a_folder_is_loaded_once_for_a_model(tmp_path, loads, kind, capsys):
    model = tiny_model("llama")
    saved(kind, model, tmp_path / "one")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    capsys.readouterr()
    for name in ("one", "one", "other"):
        generate(model, [[1, 2, 3]], kind(tmp_path / name), max_new_tokens=4)
    assert len(loads) == 1
    generate(tiny_model("llama"), [[1, 2, 3]], kind(tmp_path / "one"), max_new_tokens=4)
    assert len(loads) == 2
    assert capsys.readouterr().err == ""


def test_a_folder_whose_files_change_is_loaded_anew(tmp_path, loads):
    model = tiny_model("llama")
    saved(Medusa, model, tmp_path, num_heads=2)
    first = Medusa(tmp_path).prepared(model).drafter
    assert Medusa(tmp_path).prepared(model).drafter is first
    saved(Medusa, model, tmp_path, num_heads=3)
    second = Medusa(tmp_path).prepared(model).drafter
    assert (first.config.num_heads, second.config.num_heads) == (2, 3)
    with torch.no_grad():
        second.linears[0].weight.fill_(1.0)
    second.save_pretrained(tmp_path)  # of the same size
    third = Medusa(tmp_path).prepared(model).drafter
    assert third is not second
    assert torch.equal(third.linears[0].weight, second.linears[0].weight)
    assert len(loads) == 3


def test_a_model_of_another_dtype_has_a_drafter_of_its_own(tmp_path, loads):
    model = tiny_model("llama")
    saved(Medusa, model, tmp_path)
    assert Medusa(tmp_path).prepared(model).drafter.dtype == torch.float32
    assert Medusa(tmp_path).prepared(model.double()).drafter.dtype == torch.float64
    assert len(loads) == 2


def test_another_kind_of_drafter_is_refused_each_time(tmp_path):
    model = tiny_model("llama")
    saved(Medusa, model, tmp_path)
    Medusa(tmp_path).prepared(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="type 'medusa', not a TokenSwift drafter"):
            TokenSwift(tmp_path).prepared(model)


def test_what_is_remembered_goes_with_the_model(tmp_path):
    model = tiny_model("llama")
    saved(Medusa, model, tmp_path)
    seen = weakref.ref(Medusa(tmp_path).prepared(model).drafter)
    gc.collect()
    assert seen() is not None
    del model
    gc.collect()
    assert seen() is None


def test_triforces_small_model_is_loaded_once(tmp_path, monkeypatch, capsys):
    model, small, loads = tiny_model("llama"), tiny_model("llama", num_hidden_layers=2), []
    small.save_pretrained(tmp_path)
    capsys.readouterr()

    def noting(*options):
        loads.append(options)
        return load(*options)

    load = triforce.load_causal_model
    monkeypatch.setattr(triforce, "load_causal_model", noting)
    for _ in range(2):
        method = TriForce(draft=tmp_path, gamma=2)
        generate(model, [[1, 2, 3]], method, max_new_tokens=4)
    assert len(loads) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("on_hub", [True, False])
@pytest.mark.parametrize("shown", [True, False])
def test_settings_of_progress_bars_stay(tmp_path, shown, on_hub):
    model, small = tiny_model("llama"), tiny_model("llama", num_hidden_layers=2)
    small.save_pretrained(tmp_path)
    former = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    try:
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
        (enable_progress_bars if on_hub else disable_progress_bars)()
        TriForce(draft=tmp_path, gamma=2).prepared(model)
        assert logging.is_progress_bar_enabled() is shown
        assert are_progress_bars_disabled() is not on_hub
        (tmp_path / "model.safetensors").write_bytes(b"nothing")
        with pytest.raises(ValueError, match="cannot be read"):
            TriForce(draft=tmp_path, gamma=2).prepared(model)
        assert logging.is_progress_bar_enabled() is shown
    finally:
        (logging.enable_progress_bar if former[0] else logging.disable_progress_bar)()
        (disable_progress_bars if former[1] else enable_progress_bars)()


def test_a_drafter_is_used_as_it_is(loads):
    model = tiny_model("llama")
    drafter = MedusaHeads.for_target(model, target="tiny")
    assert Medusa(drafter).prepared(model).drafter is drafter
    assert not loads
