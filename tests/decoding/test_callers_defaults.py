"""torch's default dtype and device are the caller's: no buffer of ours follows them."""

import ast
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

import specattn
from specattn import reference, triton_kernels
from specattn.decoding import generate, release
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model
from tests.decoding.settings import NAMES, settings_of

NEW_TOKENS = 8
DRAWN = {"temperature": 1.5, "seed": 1}
PACKAGES = (specattn, reference, triton_kernels)
FLOATS = {"empty", "zeros", "ones", "rand", "randn", "linspace", "eye", "empty_strided"}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def methods(model):
    return settings_of(model)


@pytest.fixture(scope="module")
def texts():
    return prompts([9, 30])


@pytest.fixture(scope="module")
def greedy(model, texts):
    return [greedy_by_transformers(model, text, NEW_TOKENS) for text in texts]


@pytest.fixture(scope="module")
def drawn(model, methods, texts):
    """Return what a method draws with torch's own defaults, once for all others."""
    return cache(lambda name, compile: run(model, texts, methods[name], compile, **DRAWN))


def run(model, texts, method, compile, **options):
    """Run with memory of its own: what an earlier run left was made by other defaults."""
    release(model)
    found = generate(model, texts, method, max_new_tokens=NEW_TOKENS, compile=compile, **options)
    return found.new_tokens


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_defaults_reach_no_buffer(model, methods, texts, greedy, drawn, name, compile):
    """Both at once: what follows the device has no values, what follows the dtype too few bits."""
    expected = drawn(name, compile)
    with torch.device("meta"), default_dtype(torch.bfloat16):
        assert run(model, texts, methods[name], compile) == greedy
        assert run(model, texts, methods[name], compile, **DRAWN) == expected


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_a_default_of_more_bits_reaches_no_buffer(
    model, methods, texts, greedy, drawn, name, compile
):
    """Too many are at most refused, where bfloat16's are, too."""
    expected = drawn(name, compile)
    with default_dtype(torch.float64):
        assert run(model, texts, methods[name], compile) == greedy
        assert run(model, texts, methods[name], compile, **DRAWN) == expected


def _factories():
    for package in PACKAGES:
        for file in sorted(Path(package.__file__).parent.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "torch"
                ):
                    yield file, node


def test_every_buffer_says_its_dtype():
    """Also where no method of these tests comes by."""
    silent = [
        f"{file.name}:{node.lineno} torch.{node.func.attr}"
        for file, node in _factories()
        if node.func.attr in FLOATS and not {"dtype", None} & {one.arg for one in node.keywords}
    ]
    assert silent == []
