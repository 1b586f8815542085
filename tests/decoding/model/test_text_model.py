"""What callers hand over in place of a model: served, or refused with what to hand over."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from specattn.decoding import Target, generate, prove
from specattn.decoding.model.text_model import text_model
from tests.decoding.model.test_families import WRAPPERS
from tests.decoding.models import greedy_by_transformers, is_recorded, prompts, tiny_model

(TEXT,) = prompts([20])
ENTRIES = {
    "generate": lambda model: generate(model, TEXT, "plain", max_new_tokens=4),
    "quantize": lambda model: generate(model, TEXT, "plain", max_new_tokens=4, quantize="int8"),
    "prove": prove,
    "Target": lambda model: Target(model, 1, 8),
}


def test_a_compiled_model_is_the_one_inside_it():
    model = tiny_model("llama")
    names = [name for name, _ in model.named_modules()]
    compiled = torch.compile(model, backend="eager")
    output = generate(compiled, TEXT, "suffix", max_new_tokens=8)
    assert output.new_tokens == [greedy_by_transformers(model, TEXT, 8)]
    prove(compiled)
    assert is_recorded(Target(compiled, 1, 8))
    assert [name for name, _ in model.named_modules()] == names
    ids = compiled(TEXT[None]).logits.argmax(-1)
    assert ids[0, -1] == output.new_tokens[0][0]


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")


@pytest.mark.parametrize("compile", ["on", "off"])
@pytest.mark.parametrize("wrap", [compiled_forward, compiled_in_place])
def test_a_compiled_forward_changes_nothing(wrap, compile):
    model = tiny_model("llama")
    expected = [greedy_by_transformers(model, TEXT, 8)]
    wrap(model)
    output = generate(model, TEXT, "suffix", max_new_tokens=8, compile=compile)
    assert output.new_tokens == expected


@pytest.mark.filterwarnings("ignore:.* decodes through its own:UserWarning")
@pytest.mark.parametrize("part", ["", "model", "model.layers.1", "lm_head"])
def test_a_timer_around_a_forward_is_called(part):
    model, calls = tiny_model("qwen3"), []
    expected = [greedy_by_transformers(model, TEXT, 8)]
    module = model.get_submodule(part)
    forward = module.forward

    def timed(*given, **named):
        calls.append(None)
        return forward(*given, **named)

    module.forward = timed
    assert generate(model, TEXT, "suffix", max_new_tokens=8).new_tokens == expected
    calls.clear()
    assert generate(model, TEXT, "suffix", max_new_tokens=8).new_tokens == expected
    assert calls


def test_a_forward_that_takes_no_further_keywords_is_named():
    model = tiny_model("llama")
    forward = model.forward
    model.forward = lambda input_ids, use_cache=False: forward(input_ids, use_cache=use_cache)
    message = "the forward of the model was replaced, and: .* unexpected keyword argument"
    with pytest.raises(ValueError, match=message):
        prove(model)


class Adapted(nn.Module):
    """As PEFT's models are: one of transformers' inside, with other modules in its place."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.ModuleList([model])

    def get_base_model(self):
        return self.base_model[0]


class Prompted(Adapted):
    active_peft_config = SimpleNamespace(is_prompt_learning=True)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (Adapted, r"got Adapted; hand over model.get_base_model\(\)"),
        (Prompted, "got Prompted; prompts that were tuned are not served"),
        (nn.DataParallel, "got DataParallel; hand over model.module"),
        (lambda model: model.state_dict(), "got OrderedDict$"),
        (lambda model: nn.Linear(3, 3), "got Linear$"),
        (lambda model: model.model, "got LlamaModel; load it by AutoModelForCausalLM"),
    ],
    ids=["PEFT", "PEFT with prompts", "DataParallel", "weights", "module", "no head"],
)
def test_a_wrapper_is_refused_with_what_to_hand_over(wrap, message, entry):
    with pytest.raises(TypeError, match=f"model: expected a PreTrainedModel .*, {message}"):
        ENTRIES[entry](wrap(tiny_model("llama")))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("part", ["", "model.layers.1"])
def test_offloaded_weights_are_called_so(part, first, entry):
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama")
    if first:
        ENTRIES[entry](model)
    accelerate.cpu_offload(model.get_submodule(part), torch.device("cpu"))
    with pytest.raises(ValueError, match="meta"):
        ENTRIES[entry](model)


@pytest.mark.parametrize("part", ["", "model"])
def test_what_is_put_around_the_text_model_is_refused(part):
    model = AutoModelForImageTextToText.from_config(WRAPPERS["gemma-3"]()).eval()
    generate(model, TEXT, "plain", max_new_tokens=2)
    handle = model.get_submodule(part).register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="would not be called: put them on the text model"):
        generate(model, TEXT, "plain", max_new_tokens=2)
    handle.remove()
    generate(model, TEXT, "plain", max_new_tokens=2)


def test_a_head_that_is_replaced_later_is_the_text_models_too():
    model = AutoModelForImageTextToText.from_config(WRAPPERS["gemma-3"]()).eval()
    inside = text_model(model)
    model.lm_head = nn.Linear(32, 96, bias=False)
    assert text_model(model) is inside
    assert inside.lm_head is model.lm_head
