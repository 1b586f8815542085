"""What a recording depends on is noticed when it changes, and nothing else is."""

import gc
import weakref

import pytest
import torch
from torch import nn

from specattn.decoding.passes.interface import attach_streams
from specattn.decoding.passes.seen import Seen
from tests.decoding.models import tiny_model


class Part(nn.Module):
    """A module with attributes of each kind."""

    def __init__(self):
        super().__init__()
        self.flag, self.name, self.sizes, self.scale = False, "one", [1, 2.0], torch.tensor(2.0)
        self.matrix, self.vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("absent", None)
        self.child = nn.ReLU()


def model_of_parts():
    return nn.Sequential(Part(), nn.ModuleList([Part(), nn.Linear(3, 3)]))


def replace_name(part):
    del part.flag
    part.other = False


CHANGES = {
    "a flag": lambda part: setattr(part, "flag", True),
    "a flag that is a number": lambda part: setattr(part, "flag", 0),
    "a name": lambda part: setattr(part, "name", "two"),
    "an attribute more": lambda part: setattr(part, "more", 1),
    "an attribute less": lambda part: delattr(part, "flag"),
    "another attribute": replace_name,
    "an element of a list": lambda part: part.sizes.__setitem__(0, 3),
    "a list's length": lambda part: part.sizes.append(3),
    "a number for a tensor": lambda part: setattr(part, "scale", 2.0),
    "a tensor for a number": lambda part: setattr(part, "flag", torch.zeros(2)),
    "a vector": lambda part: part.vector.data.mul_(2),
    "a buffer": lambda part: part.count.add_(1),
    "a buffer more": lambda part: part.register_buffer("absent", torch.ones(1)),
    "a matrix": lambda part: part.matrix.mul_(2),
    "another matrix": lambda part: setattr(part, "matrix", nn.Parameter(torch.ones(2, 3))),
    "another matrix inside": lambda part: setattr(part.matrix, "data", torch.ones(2, 3)),
    "a matrix on its side": lambda part: setattr(part.matrix, "data", part.matrix.data.T),
    "a dtype": lambda part: part.double(),
    "training": lambda part: part.child.eval(),
    "a child": lambda part: setattr(part, "child", nn.Tanh()),
    "a child of the same class": lambda part: setattr(part, "child", nn.ReLU()),
    "a hook": lambda part: part.child.register_forward_hook(print),
    "a forward": lambda part: setattr(part.child, "forward", print),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_is_noticed(change):
    model = model_of_parts()
    seen, kept = Seen(model), model[1][0].child
    assert seen.is_of(model)
    CHANGES[change](model[1][0])
    assert not seen.is_of(model)
    assert Seen(model).is_of(model)
    assert not seen.is_of(model_of_parts())
    del kept


@torch.no_grad()
def test_what_a_recording_reads_itself_and_what_is_equal_is_no_change():
    model = model_of_parts()
    seen, part = Seen(model), model[1][0]
    part.matrix.data.mul_(2)
    part.vector.copy_(part.vector.clone())
    part.sizes = [1, 2.0]
    assert seen.is_of(model)


def test_our_own_hooks_are_no_change():
    model = tiny_model("qwen3")
    seen = Seen(model)
    for _ in range(2):
        attach_streams(model)
    assert {len(layer._forward_hooks) for layer in model.model.layers} == {1}
    assert seen.is_of(model)


def test_nothing_is_kept_alive():
    model = model_of_parts()
    seen, gone = Seen(model), weakref.ref(model[0].matrix)
    assert seen.is_of(model)
    del model
    gc.collect()
    assert gone() is None
