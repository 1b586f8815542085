"""A model that its caller changed, under switches of torch: transformers' text, or what is wrong.

The truth is what transformers' `generate` makes of a fresh model that was changed alike, under the
same switch. tests/decoding/model/test_structure.py has hooks and forwards,
tests/decoding/test_callers_defaults.py torch's default dtype and device.
"""

import copy
import pickle
import warnings
from contextlib import contextmanager, nullcontext
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode

from specattn.decoding import METHODS as ALL
from specattn.decoding import generate
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

NEW_TOKENS = 8
TEXT = prompts([24], vocabulary=64)[0]
METHODS = {
    "plain": ALL["plain"](),
    "suffix": ALL["suffix"](nodes=6, depth=4, k=3),
    "vegas": ALL["vegas"](gamma=3, ratio=0.5, min_tokens=2, switch=False),
    "cast": ALL["cast"](gamma=3),
}


class Adapter(nn.Module):
    """What an adapter does in place of a linear layer."""

    def __init__(self, base, dropout=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shape = base.in_features, base.out_features
        a, b = (torch.randn(n, 2, generator=generator) for n in shape)
        self.base, self.a, self.b = base, nn.Parameter(a), nn.Parameter(b.T.contiguous())
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + self.dropout(x) @ self.a @ self.b


def adapter(where, **options):
    def change(model):
        module = model.model.layers[1].get_submodule(where)
        parent, name = where.rsplit(".", 1)
        setattr(model.model.layers[1].get_submodule(parent), name, Adapter(module, **options))

    return change


def merged(model):
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.mlp.up_proj.weight, layer.self_attn.q_proj.weight):
                weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))


def resized(size):
    def change(model):
        torch.manual_seed(0)
        model.resize_token_embeddings(size, mean_resizing=False)
        model.config.vocab_size = size
        with torch.no_grad():
            model.get_output_embeddings().weight[64:] *= 3.0

    return change


def in_training(model):
    adapter("mlp.up_proj", dropout=0.5)(model)
    model.train()


def requires_grad(value):
    return lambda model: model.requires_grad_(value)


def at(name):
    """Return a function that finds a module of every model."""
    return lambda model: model.get_submodule(name)


UP = at("model.layers.1.mlp.up_proj")


def norm_in_bfloat16(model):
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.linspace(0.5, 1.5, 32, dtype=torch.float32))
    model.model.norm.bfloat16()


def one_to(name, *where):
    return lambda model: at(name)(model).to(*where)


def pruned(model):
    prune.l1_unstructured(UP(model), "weight", amount=0.5)


def normed(model):
    parametrizations.weight_norm(UP(model))
    UP(model).parametrizations.weight.original0.data *= 1.5


def columns(model):
    """Keep every matrix column by column."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


def inference_weights(model):
    with torch.inference_mode():
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter * 1.25, requires_grad=False))


def other_weights(model):
    model.load_state_dict(tiny_model("llama", seed=4).state_dict())


def assigned(model):
    model.load_state_dict(tiny_model("llama", seed=4).state_dict(), assign=True)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def step(model):
    """Take a step of an optimiser."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.enable_grad():
        model(TEXT[None], labels=TEXT[None]).loss.backward()
    optimiser.step()
    optimiser.zero_grad()


def gradient_checkpoints(model):
    model.gradient_checkpointing_enable()
    model.train()


def option(name, value):
    return lambda model: setattr(model.config, name, value)


def own(name, value):
    """Set what a model's own generation config says."""
    return lambda model: setattr(model.generation_config, name, value)


def scaled(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.5


def frequencies(model):
    model.model.rotary_emb.inv_freq *= 0.5


def order(model):
    """Let layers run in another order, each with the keys it had."""
    first, *rest = model.model.layers
    model.model.layers = nn.ModuleList([first, *reversed(rest)])


CHANGES = {
    "nothing": lambda model: None,
    "adapter on an MLP": adapter("mlp.up_proj"),
    "adapter on values": adapter("self_attn.v_proj"),
    "adapter on queries": adapter("self_attn.q_proj"),
    "adapter that drops": in_training,
    "merged adapter": merged,
    "more embeddings": resized(104),
    "fewer embeddings": resized(72),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "double and back": lambda model: model.double().float(),
    "an MLP in double": one_to("model.layers.1.mlp", torch.float64),
    "a head in bfloat16": one_to("lm_head", torch.bfloat16),
    "the last norm in bfloat16": norm_in_bfloat16,
    "meta": lambda model: model.to("meta"),
    "a head on meta": one_to("lm_head", "meta"),
    "a layer on meta": one_to("model.layers.2", "meta"),
    "gradients": requires_grad(True),
    "no gradients": requires_grad(False),
    "a step": step,
    "pruned": pruned,
    "weight norm": normed,
    "column by column": columns,
    "shared memory": lambda model: model.share_memory(),
    "weights of inference mode": inference_weights,
    "other weights": other_weights,
    "other weights, assigned": assigned,
    "tied": tied,
    "gradient checkpoints": gradient_checkpoints,
    "eager attention": lambda model: model.set_attn_implementation("eager"),
    "no cache": option("use_cache", False),
    "an own penalty": own("repetition_penalty", 1.7),
    "an own end": own("eos_token_id", list(range(0, 64, 3))),
    "an own length": own("max_length", 28),
    "scale": scaled,
    "frequencies": frequencies,
    "order of layers": order,
}


@contextmanager
def switched(setter, getter, value):
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextmanager
def deterministic(warn_only=False):
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def flush_denormal():
    try:
        torch.set_flush_denormal(True)
        yield
    finally:
        torch.set_flush_denormal(False)


def threads(count):
    return lambda: switched(torch.set_num_threads, torch.get_num_threads, count)


def precision(name):
    setter, getter = torch.set_float32_matmul_precision, torch.get_float32_matmul_precision
    return lambda: switched(setter, getter, name)


SWITCHES = {
    "nothing": nullcontext,
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": deterministic,
    "deterministic, warning": lambda: deterministic(warn_only=True),
    "precision medium": precision("medium"),
    "precision high": precision("high"),
    "one thread": threads(1),
    "three threads": threads(3),
    "flushed denormals": flush_denormal,
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "math alone": lambda: sdpa_kernel(SDPBackend.MATH),
    "autocast of another device": lambda: torch.autocast("cuda", torch.bfloat16),
    "autocast that is off": lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
    "profiler": lambda: torch.profiler.profile(),
    "a mode that dispatches": lambda: FlopCounterMode(display=False),
    "default float64": lambda: switched(
        torch.set_default_dtype, torch.get_default_dtype, torch.float64
    ),
}


RAISES = {  # transformers fails itself, or computes with memory that was never written
    "an MLP in double": "same dtype, but got: float != double",
    "a head in bfloat16": "same dtype, but got: float != c10::BFloat16",
    "meta": "must be on one device, got meta; weights on meta",
    "a head on meta": "must be on one device, got cpu, meta; weights on meta",
    "a layer on meta": "must be on one device, got cpu, meta; weights on meta",
    "adapter that drops": r"up_proj.dropout .* \(p=0.5\): call model.eval\(\) first",
}
UNROUNDED = {  # what the method "cast" has no rounded copy of
    "adapter on an MLP": "weights='int4': .*up_proj is a Adapter",
    "adapter on values": "weights='int4': .*v_proj is a Adapter",
    "adapter on queries": "weights='int4': .*q_proj is a Adapter",
    "adapter that drops": "weights='int4': .*up_proj is a Adapter",
    "weight norm": "weights='int4': .*up_proj is a ParametrizedLinear",
}


def expected_error(change, method):
    return {**RAISES, **(UNROUNDED if method == "cast" else {})}.get(change)


@contextmanager
def quietly():
    """Let neither transformers nor torch tell what it thinks of a change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def truth(change, switch):
    """Return the text of a fresh model that was changed so, under a switch."""
    model = tiny_model("llama")
    with quietly():
        CHANGES[change](model)
        with SWITCHES[switch]():
            # With gradient checkpoints transformers gives up its cache and reads on without it.
            return greedy_by_transformers(
                model, TEXT, NEW_TOKENS, use_cache=not model.is_gradient_checkpointing
            )


def decoded(model, method, switch="nothing", **options):
    with quietly(), SWITCHES[switch]():
        options = {"max_new_tokens": NEW_TOKENS, **options}
        return generate(model, TEXT, METHODS[method], **options).new_tokens[0]


def check(model, change, method, switch="nothing"):
    """Assert that a changed model has transformers' text, or is refused with the reason."""
    if message := expected_error(change, method):
        with pytest.raises(ValueError, match=message):
            decoded(model, method, switch)
    else:
        assert decoded(model, method, switch) == truth(change, switch)


def slow_but(quick, names):
    """Return parameters of which few are in the quick suite."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("first", slow_but([True], [True, False]))
@pytest.mark.parametrize("method", slow_but(["plain"], METHODS))
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed(change, method, first):
    """Before any run, or after the first one."""
    model = tiny_model("llama")
    if first:
        decoded(model, method)
    with quietly():
        CHANGES[change](model)
    check(model, change, method)


@pytest.mark.parametrize("method", slow_but(["suffix"], METHODS))
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_that_comes_and_goes(switch, method):
    """What a run leaves behind, the next one borrows."""
    model = tiny_model("llama")
    for now in ("nothing", switch, "nothing"):
        assert decoded(model, method, now) == truth("nothing", now)


@pytest.mark.parametrize("method", slow_but(["plain"], METHODS))
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_model_that_was_seen_under_a_switch_first(switch, method):
    model = tiny_model("llama")
    for now in (switch, "nothing"):
        assert decoded(model, method, now) == truth("nothing", now)


@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_under_switches(change, switch):
    for method in METHODS:
        model = tiny_model("llama")
        decoded(model, method)
        with quietly():
            CHANGES[change](model)
        check(model, change, method, switch)


@pytest.mark.parametrize("method", slow_but(["suffix"], METHODS))
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_a_run_goes_on(change, method):
    """It may hold from the next run only; that one is right, and no run breaks without a word."""
    model, changed = tiny_model("llama"), []

    def on_tokens(request, tokens):
        if not changed:
            changed.append(None)
            CHANGES[change](model)

    try:
        said, found = "", decoded(model, method, on_tokens=on_tokens)
    except (ValueError, TypeError) as error:
        said, found = str(error), [0] * NEW_TOKENS
    assert "NoneType" not in said
    assert len(found) == NEW_TOKENS
    assert changed
    check(model, change, method)


@pytest.mark.parametrize("method", slow_but(["plain"], METHODS))
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_and_its_original_change_apart(copied, method):
    model = tiny_model("llama")
    decoded(model, method)
    other = copied(model)
    merged(other)
    for change, one in (("merged adapter", other), ("nothing", model), ("merged adapter", other)):
        check(one, change, method)
