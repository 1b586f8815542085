"""The functions for C take what the operators take, and do what those do."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

import specattn
from specattn import _cpu
from tests.cpu import calls

HEADER = Path(__file__).parents[2] / "csrc/cpu/include/specattn.h"
LIBRARY = ctypes.CDLL(_cpu.__file__)  # Python's module has them, too
LIBRARY.specattn_error.restype = ctypes.c_char_p
OK, INVALID, OUT_OF_RANGE = range(3)
CODES = {torch.float32: (2, 32), torch.int32: (0, 32), torch.int64: (0, 64), torch.bool: (6, 8)}


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def described(tensor, device=1):
    """Return a tensor as C gets it, contiguous ones without strides."""
    sizes = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
    steps = (ctypes.c_int64 * tensor.dim())(*tensor.stride())
    kind = (tensor.dim(), *CODES[tensor.dtype], 1, sizes)
    where = (tensor.data_ptr(), device, 0)
    return DLTensor(*where, *kind, None if tensor.is_contiguous() else steps, 0)


def call(name, *arguments):
    """Call a function by tensors, numbers and None; return its status and what it said."""
    held = [described(x) if isinstance(x, torch.Tensor) else x for x in arguments]
    given = [ctypes.byref(x) if isinstance(x, DLTensor) else x for x in held]
    numbers = {float: ctypes.c_double, int: ctypes.c_int64}
    given = [numbers.get(type(x), lambda same: same)(x) for x in given]
    status = getattr(LIBRARY, f"specattn_{name}")(*given)
    return status, LIBRARY.specattn_error().decode()


def declared():
    """Return the header's functions with the names of their parameters."""
    found = re.findall(r"specattn_status specattn_(\w+)\(([^)]*)\)", HEADER.read_text())
    names = {name: [x.split()[-1].strip("*") for x in some.split(",")] for name, some in found}
    del names["use_isa"]
    return names


FUNCTIONS = declared()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_the_arguments_of_its_operator(name):
    schema = getattr(torch.ops.specattn, name).default._schema
    given = [x for x in FUNCTIONS[name] if x != "num_rows"]
    assert given == [*(x.name for x in schema.arguments), "threads"]
    assert hasattr(LIBRARY, f"specattn_{name}")


def test_every_primitive_has_a_function():
    converters = {name for name in specattn.ops.__all__ if name.startswith("lse_")}
    assert set(FUNCTIONS) == set(specattn.ops.__all__) - converters


def test_the_bits_are_those_of_the_operator(isa):
    q, k, v = torch.randn(3, 2, 5, 4, 72)[..., :64]  # strided rows
    k, v = k[:, :, :2], v[:, :, :2]
    expected, got = ((calls.poisoned(2, 5, 4, 64), calls.poisoned(2, 5, 4)) for _ in range(2))
    _cpu.tree_attention(q, k, v, None, 0.125, 0.0, *expected, 1)
    assert call("tree_attention", q, k, v, None, 0.125, 0.0, *got, 1)[0] == OK
    assert torch.equal(expected[0], got[0])
    assert torch.equal(expected[1], got[1])


def test_numbers_may_be_left_out():
    scores, lengths = torch.rand(2, 9), torch.tensor([9, 4], dtype=torch.int32)
    lists, counts = torch.empty(2, 3, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    options = (-1.0, 3, 0, 0, 1)  # a budget, and no ratio
    assert call("select_topk", scores, lengths, *options, lists, counts, 1)[0] == OK
    expected, _ = specattn.select_topk(scores, lengths, budget=3, keep_last=1)
    assert torch.equal(lists, expected)


def test_errors_have_a_status_and_a_message():
    state = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1)
    wrong = torch.zeros(1, 1, 2, 8)
    status, said = call("merge_state", *state, wrong, state[1], *state, 1)
    assert (status, "must be [1, 1, 1, 8] of float32, got [1, 1, 2, 8]" in said) == (INVALID, True)
    status, said = call("merge_state", *state, state[0].bool(), state[1], *state, 1)
    assert (status, said) == (INVALID, "out_b has the unknown type bool")
    status, said = call("merge_state", *state, None, state[1], *state, 1)
    assert (status, said[:13]) == (INVALID, "out_b must be")
    scores, lengths = torch.zeros(1, 9), torch.tensor([10], dtype=torch.int32)
    lists, counts = torch.empty(1, 3, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    status, said = call("select_topk", scores, lengths, -1.0, 3, 0, 0, 0, lists, counts, 1)
    assert (status, said[:13]) == (OUT_OF_RANGE, "cache_seqlens")


def test_what_lies_elsewhere_is_refused():
    state = described(torch.zeros(1, 1, 1, 8), device=2)
    status = LIBRARY.specattn_merge_state(*[ctypes.byref(state)] * 6, 1)
    assert (status, LIBRARY.specattn_error()) == (INVALID, b"out_a must lie on the CPU")
