import gc
import weakref

import pytest
import torch

from specattn.ops import _recent
from specattn.ops._recent import Recent


def tensors():
    return torch.zeros(2, 3), None, torch.zeros(4, dtype=torch.int32)


@pytest.fixture
def recent():
    found = Recent()
    found.remember("key", tensors(), "found")
    return found


def test_equal_forms_are_recalled(recent):
    assert recent.recall("key", tensors()) == "found"
    assert recent.recall("other", tensors()) is None


@pytest.mark.parametrize(
    ("place", "other"),
    [
        (0, torch.zeros(2, 4)),
        (0, torch.zeros(3, 2).t()),
        (0, torch.zeros(2, 3, dtype=torch.bfloat16)),
        (0, torch.zeros(2, 3, device="meta")),
        (0, torch.zeros(2, 3, requires_grad=True)),
        (0, None),
        (1, torch.empty(0)),
        (2, "text"),
    ],
    ids=["shape", "strides", "dtype", "device", "gradient", "nothing", "something", "no tensor"],
)
def test_other_forms_are_not(recent, place, other):
    given = list(tensors())
    given[place] = other
    assert recent.recall("key", given) is None


def test_no_tensor_is_kept(recent):
    given = torch.zeros(7)
    kept = weakref.ref(given)
    recent.remember("key", (given,), "found")
    del given
    gc.collect()
    assert kept() is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(_recent, "_MOST_KEYS", 3)
    recent = Recent()
    for size in range(20):
        recent.remember("key", (torch.zeros(size),), size)
        recent.remember(size, (torch.zeros(size),), size)
    assert len(recent.sets) <= 3
    recent.remember("last", (torch.zeros(1),), "last")
    assert len(recent.sets.get("key", ())) <= _recent._MOST_SETS
    assert recent.recall("last", (torch.zeros(1),)) == "last"


def test_a_tensor_given_twice_is_looked_up_as_ever(recent):
    same = torch.zeros(2)
    recent.remember("twice", (same, same), "found")
    assert recent.recall("twice", (same, same)) is None
