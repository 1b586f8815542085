"""The cache that grows in place holds what transformers' own does."""

import copy

import pytest
import torch
from transformers import DynamicCache

from specattn.integrations.transformers import Cache
from tests.decoding.models import tiny_model


def rows(count, batch=2):
    return torch.randn(2, batch, 3, count, 8)


@pytest.fixture
def both(poisoned_empty):
    """Return ours and transformers', and a function that appends to both and compares."""
    caches = Cache(), DynamicCache()

    def append(count, batch=2):
        new = rows(count, batch)
        found, expected = ([x.clone() for x in c.update(*new, layer_idx=0)] for c in caches)
        assert all(map(torch.equal, found, expected))
        assert caches[0].get_seq_length() == caches[1].get_seq_length()

    append(5)
    return *caches, append


def test_growth_moves_nothing_but_now_and_then(both):
    ours, _, append = both
    places = set()
    for count in [1] * 300 + [700] + [1] * 20:
        append(count)
        places.add(ours.layers[0].keys.data_ptr())
    assert len(places) < 6


OPERATIONS = {
    "crop": lambda cache: cache.crop(-3),
    "crop to nothing": lambda cache: cache.crop(-5),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset": lambda cache: cache.reset(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(both, name):
    *caches, append = both
    for cache in caches:
        OPERATIONS[name](cache)
    batch = {"repeat": 4, "select": 1}.get(name, 2)
    for count in (4, 1, 300):
        append(count, batch)


def test_a_copy_is_its_own(both):
    ours, _, append = both
    other, before = copy.deepcopy(ours), ours.layers[0].keys.clone()
    other.update(*rows(4), layer_idx=0)
    assert torch.equal(ours.layers[0].keys, before)
    append(3)


def test_what_was_read_in_inference_mode_is_gone_on_with_outside(both):
    """Such as a prompt that many generations begin with: `generate` has torch.no_grad alone."""
    *_, append = both
    for inference in (True, False, True, False):
        with torch.inference_mode(inference), torch.no_grad():
            append(1)
            append(300)


def test_windows_are_kept_to():
    model = tiny_model("gpt_oss")
    kinds = [type(layer).__name__ for layer in Cache(model.config).layers]
    assert kinds == ["DynamicSlidingWindowLayer", "GrowingLayer"] * 2


def test_gradients_flow():
    cache, new = Cache(), rows(5).requires_grad_()
    cache.update(*new, layer_idx=0)
    keys, _ = cache.update(*rows(1), layer_idx=0)
    keys.sum().backward()
    assert new.grad[0].eq(1).all()
    assert new.grad[1].eq(0).all()
