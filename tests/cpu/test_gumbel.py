"""The noise of sampling in C++: the reference's, and the same bits on every code path."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import specattn
from specattn import _cpu
from tests import gumbel
from tests.cpu import calls

per_isa = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@per_isa
@given(problem=gumbel.PROBLEMS)
def test_is_the_references_noise(isa, problem):
    with specattn.use_backend("cpu"):
        gumbel.check(**problem)


def arguments(vocabulary=5000, dtype=torch.float32):
    logits = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype)
    return logits, 7, torch.tensor([0, 9]), torch.tensor([100, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_path_and_number_of_threads_has_the_same_bits(dtype):
    before, found = _cpu.isa(), []
    try:
        for name in _cpu.isas():
            _cpu.use_isa(name)
            for threads in (1, 3):
                out = calls.poisoned(2, 5000, dtype=torch.float32)
                _cpu.add_gumbel_noise(*arguments(dtype=dtype), out, threads)
                found.append(out)
    finally:
        _cpu.use_isa(before)
    assert all(torch.equal(out, found[0]) for out in found)


def test_in_place(isa):
    logits, *rest = arguments()
    expected = specattn.add_gumbel_noise(logits, *rest)
    assert specattn.add_gumbel_noise(logits, *rest, out=logits) is logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (0, torch.zeros(2, 50).double(), "logits must .* be float32, bfloat16 or float16"),
        (2, torch.zeros(3).long(), "requests"),
        (3, torch.zeros(4).long()[::2], "positions must be contiguous"),
        (4, torch.zeros(2, 49), "out"),
    ],
)
def test_refuses(index, wrong, message):
    given = [*arguments(50), torch.zeros(2, 50)]
    given[index] = wrong
    with pytest.raises(ValueError, match=message):
        _cpu.add_gumbel_noise(*given, 1)
