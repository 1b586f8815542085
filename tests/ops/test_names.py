"""A primitive is found by its name in every folder; none is in a list kept by hand."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import specattn
from specattn import ops, reference
from specattn.backends import triton
from specattn.backends.backend import function_named
from tests.ops.calls import PRIMITIVES

TESTS = Path(__file__).parents[1]

OP = """
import torch

from ._check import check_tensors
from ._library import define

_operator = define("toy_negation(Tensor q, float softmax_scale, Tensor(a!) out)")


def toy_negation(q, *, softmax_scale=1.0):
    check_tensors(q=q)
    out = torch.empty_like(q)
    _operator(q, softmax_scale, out)
    return out
"""
REFERENCE = """
def toy_negation(q, softmax_scale=1.0):
    return -q * softmax_scale
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Add a primitive as its author would, by two files; return its public function."""
    for package, text in ((ops, OP), (reference, REFERENCE)):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "toy_negation.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    yield importlib.import_module("specattn.ops.toy_negation").toy_negation
    for package in (ops, reference):
        del package.toy_negation, sys.modules[f"{package.__name__}.toy_negation"]


def test_a_new_primitive_is_its_files(toy):
    q, out = torch.randn(2, 3, 4, 8), torch.empty(2, 3, 4, 8)
    with specattn.use_backend("reference"):
        assert torch.equal(toy(q, softmax_scale=2.0), -2 * q)
        torch.ops.specattn.toy_negation(q, 0.5, out)
        assert torch.equal(out, -q / 2)
        compiled = torch.compile(toy, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q), -q)
        torch.library.opcheck(torch.ops.specattn.toy_negation.default, (q, 0.5, out))
    with pytest.raises(TypeError, match="^q: expected a tensor, got list"):
        toy([1.0])
    cpu = specattn.backends()["cpu"]
    why_not = "it has no toy_negation" if cpu == "available" else cpu
    with pytest.warns(UserWarning, match=f"toy_negation runs on the slow reference.*{why_not}"):
        assert torch.equal(toy(q), -q)


@pytest.mark.parametrize("op", PRIMITIVES)
def test_a_primitive_has_its_name_in_every_folder(op):
    assert hasattr(specattn, op), f"specattn.{op} is missing"
    assert hasattr(torch.ops.specattn, op), f"ops/{op}.py defines no operator {op}"
    assert function_named(op, "reference"), f"reference/{op}.py has no function {op}"
    test = TESTS / "reference" / f"test_{op}.py"
    assert test.exists(), f"{test.relative_to(TESTS.parent)} is missing"


@pytest.mark.parametrize("op", PRIMITIVES)
def test_a_primitive_has_its_name_in_triton(op):
    pytest.importorskip("triton")
    assert triton.BACKEND.find(op), f"triton_kernels/{op}.py has no function {op}"


@pytest.mark.parametrize("op", PRIMITIVES)
def test_a_primitive_has_its_name_in_the_extension(op):
    _cpu = pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")
    assert hasattr(_cpu, op), f"csrc/cpu/operators_*.cpp have no {op}"
