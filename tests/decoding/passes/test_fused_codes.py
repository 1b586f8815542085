"""Captured passes over weights of 8 and 4 bits: published ones, and texts of every method.

There is no GPU here: see `captured`. Codes are multiplied by their kernel, as whole weights are.
"""

import pytest
import torch

import specattn
from specattn.decoding import generate, release
from specattn.decoding.engine.target import Target
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.decoding.model.quantised import quantised
from specattn.tree import Tree
from tests.decoding.model.test_published import METHODS, publish
from tests.decoding.models import prompts, tiny_model
from tests.decoding.settings import NAMES, settings_of, settings_without_layers

if specattn.backends()["triton"] != "available":
    pytest.skip("Triton is not available here", allow_module_level=True)

from tests.decoding.captured import (
    FEW,
    IN_MODULES,
    LENGTHS,
    assert_alike,
    captured_runner,
    two_targets,
)

KERNEL = "linear_codes_kernel"


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Codes lie in rows, and no kernel of a CPU takes them, which no graph keeps."""
    monkeypatch.setattr("specattn.quantised._IN_KERNELS", ())
    monkeypatch.setattr("specattn.quantised._BY_TILES", ())


def published():
    """Yield every method that is read; one with zero points is quick."""
    for name in METHODS:
        yield pytest.param(name, marks=() if name == "gptq-4-zeros" else pytest.mark.slow)


@pytest.mark.parametrize("name", list(published()))
def test_published_codes_are_multiplied_by_their_kernel(tmp_path, name):
    """Where they lie as they were read: a captured pass is that of the weights that they mean."""
    expected = publish(tmp_path, METHODS[name])
    model = load_causal_model(tmp_path, torch.float32)
    targets, graphs = two_targets(model)
    meant = Target(expected, len(LENGTHS), 48, "off")
    tree = Tree([-1, 0, 0, 1, 1])
    tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=3))
    with torch.no_grad():
        meant.prefill(prompts(LENGTHS), chunk_size=1000)
        found, modules, whole = (x.verify(tree, tokens) for x in (*targets, meant))
    assert_alike(model, found.logits, modules.logits)
    assert_alike(model, found.logits, whole.logits)
    (graph,) = graphs
    layers = model.config.num_hidden_layers
    assert graph.tape.kernels.count(KERNEL) == 4 * layers


QUICK = {"plain": "int4"}


def cases():
    """Yield methods and kinds: all over 4 bits, of plain decoding and Vegas all kinds."""
    for name in NAMES:
        kinds = ["int4", *(("int8", "fp8") if name in ("plain", "vegas") else ())]
        for kind in kinds:
            if name == "cast" and kind == "int4":  # there is nothing to round
                kind = "int8"
            marks = () if QUICK.get(name) == kind else pytest.mark.slow
            yield pytest.param(name, kind, marks=marks, id=f"{name}-{kind}")


@pytest.mark.parametrize(("name", "kind"), list(cases()))
def test_texts_are_those_of_plain_decoding(name, kind, monkeypatch):
    layers = 1 if name in QUICK else 3  # that EAGLE-3 reads
    sizes = FEW | {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 128}
    model = tiny_model("llama", vocab_size=24, peak=1.0, **sizes)
    of = settings_without_layers if name in QUICK else settings_of
    given, settings = prompts([19, 5], vocabulary=24, seed=3), {"quantize": kind}
    settings |= {"max_new_tokens": 4 if name in QUICK else 8, "temperature": 0}
    expected = generate(model, given, "plain", compile="off", **settings)
    release(model)
    few, graphs = quantised(model, kind), []

    def captured(target, compile):
        return captured_runner(target, graphs)

    monkeypatch.setattr(Target, "_runner", captured)
    found = generate(model, given, of(model)[name], **settings)
    assert quantised(model, kind) is few
    assert found.new_tokens == expected.new_tokens
    if name not in IN_MODULES:
        assert any(KERNEL in graph.tape.kernels for graph in graphs), "no codes were captured"
