"""Rounded weights of a model that was changed since: they are rounded again, or it is refused."""

import pytest
import torch
from torch import nn

from specattn.decoding import generate
from specattn.decoding.model.quantised import QUANTIZE, quantised
from tests.decoding.models import prompts, tiny_model
from tests.decoding.test_quantised_weights import WHOLE_GROUPS, model_of, texts


def step(model):
    x, rule = torch.arange(20)[None], torch.optim.SGD(model.parameters(), lr=3.0)
    model(x, labels=x).loss.backward()
    rule.step()
    rule.zero_grad()


def assigned(model):
    other = tiny_model("qwen3", seed=5, vocab_size=24, peak=1.0, **WHOLE_GROUPS)
    model.load_state_dict(other.state_dict(), assign=True)


def norm(model):
    layer = model.model.layers[0]
    layer.input_layernorm.weight = nn.Parameter(torch.linspace(-3, 3, 64))


def another_mlp(model):
    other = tiny_model("qwen3", seed=5, vocab_size=24, peak=1.0, **WHOLE_GROUPS)
    model.model.layers[0].mlp = other.model.layers[0].mlp


def own_mlp(model):
    return model.model.layers[0].mlp


CHANGES = {
    "load_state_dict": lambda model: model.load_state_dict(
        tiny_model("qwen3", seed=5, vocab_size=24, peak=1.0, **WHOLE_GROUPS).state_dict()
    ),
    "assigned": assigned,
    "step": step,
    "merged": lambda model: own_mlp(model).down_proj.weight.data.mul_(-1),
    "a row": lambda model: own_mlp(model).up_proj.weight.data[7].mul_(-40),
    "a column": lambda model: own_mlp(model).gate_proj.weight.data[:, 7].mul_(-40),
    "data": lambda model: setattr(
        own_mlp(model).down_proj.weight, "data", own_mlp(model).down_proj.weight.data.neg()
    ),
    "a norm": norm,
    "a module": another_mlp,
    "a hook": lambda model: own_mlp(model).register_forward_hook(lambda *given: -given[2]),
    "a class": lambda model: setattr(
        own_mlp(model),
        "__class__",
        type("Other", (type(own_mlp(model)),), {"forward": lambda self, x: -x}),
    ),
    "a layer less": lambda model: setattr(model.config, "num_hidden_layers", 2),
}


@pytest.mark.filterwarnings("ignore:.*decodes through its own, slower modules")
@pytest.mark.parametrize(
    ("change", "kind"),
    [  # what is seen of a change does not depend on how weights are rounded
        pytest.param(
            change,
            kind,
            marks=() if kind == "int4" or change in ("a row", "a column") else pytest.mark.slow,
        )
        for change in CHANGES
        for kind in QUANTIZE
    ],
)
def test_weights_are_rounded_again_where_the_model_was_changed(change, kind):
    own = {"vocab_size": 24, "peak": 1.0}
    model, fresh = model_of(**own), model_of(**own)
    before = texts(model, "plain", kind)
    few = quantised(model, kind)
    assert quantised(model, kind) is few
    CHANGES[change](model)
    CHANGES[change](fresh)
    assert texts(model, "plain", kind) == texts(fresh, "plain", kind) != before
    assert quantised(model, kind) is not few


def test_drafts_are_of_weights_rounded_again():
    own = {"vocab_size": 24, "peak": 1.0}
    model, fresh = model_of(**own), model_of(**own)
    given = prompts([30], vocabulary=24, seed=3)

    def drafted(model):
        output = generate(model, given, "cast:gamma=3", max_new_tokens=24, temperature=0)
        return output.new_tokens, output.statistics.total.accepted

    drafted(model)
    for one in (model, fresh):
        CHANGES["load_state_dict"](one)
    assert drafted(model) == drafted(fresh)


def test_training_mode_alone_rounds_nothing_again():
    model = model_of()
    few = quantised(model, "int4")
    model.train()
    assert quantised(model, "int4") is few
    assert all(module.training for module in few.modules())
    model.eval()
    assert quantised(model, "int4") is few
    assert not any(module.training for module in few.modules())


def test_a_forward_of_the_whole_weights_is_refused():
    own = {"vocab_size": 24, "peak": 1.0}
    model = model_of(**own)
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: forward(x)
    message = "quantize='int8': the forward of model.layers.0.mlp was replaced"
    with pytest.raises(ValueError, match=message):
        quantised(model, "int8")
    del model.model.layers[0].mlp.forward
    model.forward = torch.compile(model.forward, backend="eager")  # the same by another way
    assert texts(model, "plain", "int8") == texts(model_of(**own), "plain", "int8")
