"""Docstrings of public names are NumPy's and whole; their examples run (part of `make lint`)."""

import dataclasses
import doctest
import importlib
import inspect
from pathlib import Path

import pytest
from docs.tools.public import MODULES
from numpydoc.docscrape import get_doc_object
from numpydoc.validate import validate

# What is not asked of a docstring here, and why.
NOT_ASKED = {
    "ES01": "a short summary may be enough",
    "EX01": "below it is said who must have an example",
    "SA01": "the reference is ordered by subject",
    "PR03": "arguments of one kind are documented together",
    "PR04": "arguments that another function documents have no type again",
    "PR07": "a name and a type may say everything",
    "PR08": "descriptions may begin with a dtype",
    "RT02": "returned tensors are named",
    "RT03": "a name and a shape may say everything",
    "RT04": "descriptions may begin with a dtype",
}

SOURCE = Path(importlib.import_module("specattn").__file__).parents[1]
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if "\n    >>> " in path.read_text()
)


def documented():
    """Return the functions and classes that the public modules export, by name."""
    found = {}
    for path in MODULES:
        module = importlib.import_module(path)
        for name in module.__all__:
            try:
                value = getattr(module, name)
            except ImportError:  # drafters of vLLM, where that is not installed
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                found[f"{path}.{name}"] = value
    return found


PUBLIC = documented()


def arguments(value):
    """Return the names of the arguments that a function or a class itself defines."""
    if not inspect.isclass(value):
        return set(inspect.signature(value).parameters)
    if dataclasses.is_dataclass(value) or "_fields" in vars(value):
        return {name for name in inspect.get_annotations(value) if name in _fields(value)}
    if "__init__" not in vars(value):
        return set()
    return set(inspect.signature(value.__init__).parameters) - {"self", "args", "kwargs"}


def _fields(value):
    if not dataclasses.is_dataclass(value):
        return value._fields
    return [field.name for field in dataclasses.fields(value) if field.init]


@pytest.mark.parametrize("name", PUBLIC)
def test_numpydoc_finds_nothing(name):
    errors = validate(get_doc_object(PUBLIC[name]))["errors"]
    assert [error for error in errors if error[0] not in {"PR01", *NOT_ASKED}] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_documented(name):
    """As numpydoc's PR01, but fields that stand under Attributes count."""
    value = PUBLIC[name]
    told = get_doc_object(value)
    names = {
        one.strip().lstrip("*")
        for section in ("Parameters", "Other Parameters", "Attributes")
        for entry in told[section]
        for one in entry.name.split(",")
    }
    assert arguments(value) - names == set()


def test_every_exception_to_the_rules_is_used():
    found = {
        code for value in PUBLIC.values() for code, _ in validate(get_doc_object(value))["errors"]
    }
    assert NOT_ASKED.keys() <= found


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run_and_print_what_they_say(name):
    # A primitive's module is hidden by the function of the same name.
    ran = doctest.testmod(importlib.import_module(name))
    assert ran.attempted > 0
    assert ran.failed == 0


@pytest.mark.parametrize("name", ["Tree", *importlib.import_module("specattn.ops").__all__])
def test_it_has_an_example(name):
    assert ">>> " in getattr(importlib.import_module("specattn"), name).__doc__
