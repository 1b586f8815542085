"""Captured passes over caches of 8 bits, of every method: texts are those of plain decoding.

There is no GPU here: see `captured`. Rows are rounded by the kernel that rotates heads.
"""

import pytest
import torch

import specattn
from specattn.decoding import generate, release
from specattn.decoding.engine.target import Target
from specattn.decoding.passes.runner import Runner
from specattn.kv_cache import KVCache
from tests.decoding.models import prompts, tiny_model
from tests.decoding.settings import NAMES, settings_of, settings_without_layers

if specattn.backends()["triton"] != "available":
    pytest.skip("Triton is not available here", allow_module_level=True)

from tests.decoding.captured import FEW, IN_MODULES, captured_runner

QUICK = {"plain": "fp8"}


def cases():
    """Yield methods and types: all over int8, of plain decoding and Vegas all types."""
    for name in NAMES:
        kinds = ["int8", *(("fp8", "fp8_e5m2") if name in ("plain", "vegas") else ())]
        for kind in kinds:
            marks = () if QUICK.get(name) == kind else pytest.mark.slow
            yield pytest.param(name, kind, marks=marks, id=f"{name}-{kind}")


@pytest.mark.parametrize(("name", "kv_dtype"), list(cases()))
def test_texts_are_those_of_plain_decoding(name, kv_dtype, monkeypatch):
    layers = 1 if name in QUICK else 3  # that EAGLE-3 reads
    model = tiny_model("llama", vocab_size=24, peak=1.0, **FEW | {"num_hidden_layers": layers})
    of = settings_without_layers if name in QUICK else settings_of
    given, settings = prompts([19, 5], vocabulary=24, seed=3), {"kv_dtype": kv_dtype}
    settings |= {"max_new_tokens": 4 if name in QUICK else 8, "temperature": 0}
    expected = generate(model, given, "plain", compile="off", **settings)
    release(model)
    taken, through_modules, run = [], [], Runner.run

    def captured(target, compile):
        taken.append(captured_runner(target))
        return taken[-1]

    def noted(runner, plan, tokens):
        through_modules.append(tokens.shape)
        return run(runner, plan, tokens)

    def places(cache, slots):  # a graph cannot ask whether they are within a cache
        return slots[0] * cache.capacity + slots[1]

    monkeypatch.setattr(Target, "_runner", captured)
    monkeypatch.setattr(Runner, "run", noted)
    monkeypatch.setattr(KVCache, "places", places)
    found = generate(model, given, of(model)[name], **settings)
    assert found.new_tokens == expected.new_tokens
    assert {runner.attention.cache.stored for runner in taken} >= {
        {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_dtype]
    }
    assert any(len(runner._passes._kept) for runner in taken), "nothing was captured"
    assert not through_modules or name in IN_MODULES
