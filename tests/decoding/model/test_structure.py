"""What was proved of a model is believed as long as the model stands as it was."""

import copy
import gc
import pickle
import weakref

import pytest
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaModel

from specattn.decoding import Target, generate
from specattn.decoding.model.structure import structure_of
from tests.decoding.models import greedy_by_transformers, is_recorded, prompts, tiny_model

(TEXT,) = prompts([20])
WARNS = pytest.mark.filterwarnings("ignore:.* decodes through its own:UserWarning")


def negated(output):
    """Return a module's output with its tensor turned around, in place where it is an object."""
    if hasattr(output, "logits"):
        output.logits = -output.logits
    elif hasattr(output, "last_hidden_state"):
        output.last_hidden_state = -output.last_hidden_state
    elif isinstance(output, tuple):
        return (-output[0], *output[1:])
    else:
        return -output
    return output


def hook(module, given, output):
    return negated(output)


def other_tokens(module, given, named):
    return given, named | {"input_ids": (named["input_ids"] + 1) % 90}


def replace(module, change=negated):
    """Put a function around a module's forward, as accelerate, timers and steering do."""
    forward = module.forward
    module.forward = lambda *given, **named: change(forward(*given, **named))


def patch_class(monkeypatch, kind):
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given, **named: negated(forward(*given, **named)))


class Negated(LlamaMLP):
    def forward(self, x):
        return -super().forward(x)


def of_layer(name):
    return lambda model, _: replace(model.model.layers[1].get_submodule(name))


def global_hook(kind):
    def change(model, patch):
        def only(module, given, output):
            return negated(output) if isinstance(module, kind) else None

        handle = register_module_forward_hook(only)
        patch.callback(handle.remove)

    return change


def global_pre_hook(model, patch):
    def only(module, given):
        return (-given[0],) if isinstance(module, LlamaMLP) else None

    patch.callback(register_module_forward_pre_hook(only).remove)


def rope(model, patch):
    own = modeling_llama.apply_rotary_pos_emb
    patch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, *a: own(q, k, cos, -sin, *a)
    )


CHANGES = {
    "forward of a layer": lambda model, _: replace(model.model.layers[1]),
    "forward of an attention": of_layer("self_attn"),
    "forward of an MLP": of_layer("mlp"),
    "forward of a projection": of_layer("mlp.down_proj"),
    "forward of a norm": of_layer("input_layernorm"),
    "forward of the embedding": lambda model, _: replace(model.model.embed_tokens),
    "forward of the head": lambda model, _: replace(model.lm_head),
    "forward of the base": lambda model, _: replace(model.model),
    "forward of the model": lambda model, _: replace(model),
    "hook on an MLP": lambda model, _: model.model.layers[0].mlp.register_forward_hook(hook),
    "hook on the head": lambda model, _: model.lm_head.register_forward_hook(hook),
    "hook on the base": lambda model, _: model.model.register_forward_hook(hook),
    "hook on the model": lambda model, _: model.register_forward_hook(hook),
    "hook before the model": lambda model, _: model.register_forward_pre_hook(
        other_tokens, with_kwargs=True
    ),
    "global hook on MLPs": global_hook(LlamaMLP),
    "global hook before MLPs": global_pre_hook,
    "class of an MLP": lambda model, _: setattr(model.model.layers[0].mlp, "__class__", Negated),
    "forward of the class of MLPs": lambda _, patch: patch_class(patch, LlamaMLP),
    "forward of the class of linear layers": lambda _, patch: patch_class(patch, nn.Linear),
    "forward of the class of the base": lambda _, patch: patch_class(patch, LlamaModel),
    "function of the modelling code": rope,
    "another module": lambda model, _: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()),
}


@pytest.fixture
def patch(monkeypatch):
    """Patches, and what else is to be undone."""
    undo = []
    monkeypatch.callback = undo.append
    yield monkeypatch
    for one in undo:
        one()


@WARNS
@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_run_is_obeyed(change, compile, patch):
    model = tiny_model("llama")
    before = generate(model, TEXT, "suffix", max_new_tokens=8).new_tokens
    CHANGES[change](model, patch)
    expected = [greedy_by_transformers(model, TEXT, 8)]
    assert expected != before
    options = {"max_new_tokens": 8, "compile": compile}
    assert generate(model, TEXT, "suffix", **options).new_tokens == expected


@WARNS
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_served_in_a_call_of_the_whole_model(family):
    """Which hands down whether routers' logits are wanted."""
    model = tiny_model(family)
    called = []
    model.register_forward_hook(lambda *_: called.append(1))
    expected = [greedy_by_transformers(model, TEXT, 8)]
    called.clear()
    assert generate(model, TEXT, "suffix", max_new_tokens=8).new_tokens == expected
    assert called


REFUSED = {
    "forward of the class of the model": lambda _, patch: patch_class(patch, LlamaForCausalLM),
    "global hook on the model": global_hook(LlamaForCausalLM),
    "setting": lambda model, _: setattr(model.config, "final_logit_softcapping", 0.1),
}


@pytest.mark.parametrize("change", REFUSED)
def test_a_change_that_cannot_be_obeyed_is_refused(change, patch):
    model = tiny_model("llama")
    generate(model, TEXT, "suffix", max_new_tokens=8)
    REFUSED[change](model, patch)
    with pytest.raises(ValueError, match="differ by .* what follows the attention of the last"):
        generate(model, TEXT, "suffix", max_new_tokens=8)


def last_row(output):
    """Change what plain decoding reads of a pass: of several tokens it is the last one alone."""
    output.logits[:, -1] *= -1
    return output


def test_a_function_that_changes_a_passs_last_row_alone_is_refused():
    for change in (
        lambda model: replace(model, last_row),
        lambda model: model.register_forward_hook(lambda _, __, output: last_row(output)),
    ):
        model = tiny_model("llama")
        generate(model, TEXT, "suffix", max_new_tokens=8)
        change(model)
        with pytest.raises(ValueError, match="first in what a call of the whole model does; the"):
            generate(model, TEXT, "suffix", max_new_tokens=8)


@WARNS
def test_what_a_user_put_there_is_called_in_every_pass_until_it_is_gone():
    model, calls = tiny_model("llama"), []
    expected = generate(model, TEXT, "plain", max_new_tokens=8).new_tokens
    handle = model.register_forward_hook(lambda *_: calls.append(None))
    assert generate(model, TEXT, "plain", max_new_tokens=8).new_tokens == expected
    calls.clear()
    assert generate(model, TEXT, "plain", max_new_tokens=8).new_tokens == expected
    assert len(calls) == 9  # the prompt but for its last token, then every token
    handle.remove()
    calls.clear()
    assert is_recorded(Target(model, 1, 8))
    assert calls == []


def test_a_structure_is_known_again():
    model = tiny_model("llama")
    first = structure_of(model)
    assert structure_of(model) is first
    assert first.replaced is None
    handle = model.model.layers[0].register_forward_hook(hook)
    second = structure_of(model)
    assert second.number != first.number
    assert second.replaced == "model.layers.0 has forward hooks"
    assert not second.at_ends
    handle.remove()
    assert structure_of(model) is first
    model.train()
    assert structure_of(model).in_training
    assert structure_of(model).number == first.number
    model.eval()
    assert structure_of(model) is first
    assert structure_of(tiny_model("llama")).number not in (first.number, second.number)


def test_another_function_in_the_place_of_one_is_noticed():
    """Though it may lie where the first one lay in memory."""
    model, numbers = tiny_model("llama"), set()
    for factor in range(8):
        handle = model.model.layers[0].register_forward_hook(lambda *_, factor=factor: None)
        numbers.add(structure_of(model).number)
        handle.remove()
        gc.collect()
    assert len(numbers) == 8


def test_our_own_functions_are_no_change():
    model = tiny_model("qwen3_next")
    before = structure_of(model)
    target = Target(model, 1, 8)
    target.hand_out((1,))
    assert structure_of(model) is before
    assert before.replaced is None


def test_a_structure_keeps_no_model():
    model = tiny_model("llama")
    model.model.layers[0].register_forward_hook(lambda *_, model=model: None)
    replace(model, lambda output, model=model: output)
    structure_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_that_was_asked_can_be_copied_and_pickled():
    model = tiny_model("llama")
    structure_of(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert structure_of(other).number != structure_of(model).number
        output = generate(other, TEXT, "plain", max_new_tokens=4)
        assert output.new_tokens == [greedy_by_transformers(model, TEXT, 4)]
    assert other.config._attn_implementation.startswith("specattn")
    for dumped in (pickle.dumps(other), pickle.dumps(other.config)):
        assert b"specattn" not in dumped  # which need not be installed where it is read
    assert copy.deepcopy(other).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("first", [True, False])
def test_dropout_in_training_is_refused_and_training_alone_is_not(first):
    model = tiny_model("llama")
    expected = [greedy_by_transformers(model, TEXT, 8)]
    if first:
        generate(model, TEXT, "plain", max_new_tokens=8)
    model.train()
    assert generate(model, TEXT, "plain", max_new_tokens=8).new_tokens == expected
    model.model.layers[1].self_attn.attention_dropout = 0.5
    message = r"model.layers.1.self_attn .* \(attention_dropout=0.5\): call model.eval\(\) first"
    with pytest.raises(ValueError, match=message):
        generate(model, TEXT, "plain", max_new_tokens=8)
    model.eval()
    assert generate(model, TEXT, "plain", max_new_tokens=8).new_tokens == expected
