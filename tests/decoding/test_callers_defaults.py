"""torch's default dtype and device are the caller's: no buffer of ours follows them."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import specattn
from specattn import reference, triton_kernels
from specattn.decoding import generate
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model
from tests.decoding.settings import NAMES, settings_of

NEW_TOKENS = 8
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


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_default_dtype_reaches_no_buffer(model, methods, name, dtype, compile):
    texts, given = prompts([9, 30]), {"max_new_tokens": NEW_TOKENS, "compile": compile}
    expected = [greedy_by_transformers(model, text, NEW_TOKENS) for text in texts]
    drawn = generate(model, texts, methods[name], temperature=1.5, seed=1, **given).new_tokens
    with default_dtype(dtype):
        assert generate(model, texts, methods[name], **given).new_tokens == expected
        again = generate(model, texts, methods[name], temperature=1.5, seed=1, **given)
    assert again.new_tokens == drawn


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


@pytest.mark.parametrize("how", ["recorded", "modules"])
@pytest.mark.parametrize("name", NAMES)
def test_a_default_device_reaches_no_buffer(model, methods, name, how):
    """What would lie on the default device here has no values: nothing of ours does."""
    texts, given = prompts([9, 30]), {"max_new_tokens": NEW_TOKENS}
    given["compile"] = "on" if how == "recorded" else "off"
    expected = [greedy_by_transformers(model, text, NEW_TOKENS) for text in texts]
    drawn = generate(model, texts, methods[name], temperature=1.5, seed=1, **given).new_tokens
    with torch.device("meta"):
        assert generate(model, texts, methods[name], **given).new_tokens == expected
        again = generate(model, texts, methods[name], temperature=1.5, seed=1, **given)
    assert again.new_tokens == drawn
