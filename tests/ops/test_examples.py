"""The examples in the documentation run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import specattn.ops

MODULES = ["specattn.backends.select"] + [
    f"specattn.ops.{module.name}" for module in pkgutil.iter_modules(specattn.ops.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    # A primitive's module is hidden by the function of the same name.
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", [n for n in specattn.__all__ if hasattr(specattn.ops, n)])
def test_every_primitive_has_an_example(name):
    assert ">>> " in getattr(specattn, name).__doc__
