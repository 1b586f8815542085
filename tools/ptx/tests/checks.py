"""Executes cases in the emulator and holds them against float64 with the project's bound."""

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from tests.cases import assert_accurate

from ..launch import emulated
from ..machine import Options
from .operations import OPERATIONS


@dataclass
class Outcome:
    """What an emulated call returned, and its launches."""

    results: list
    launches: list = field(default_factory=list)

    def same_bits(self, other):
        """Return whether another run of the case returned the same bits."""
        return all(
            torch.equal(_bits(x), _bits(y))
            for x, y in zip(self.results, other.results, strict=True)
        )


def _bits(x):
    return x.contiguous().view(torch.uint8)


def run(case, arch, options=None, change=None, emulate=None):
    """Execute a case and check it; `Fault` or AssertionError if it is wrong.

    ``emulate`` is what serves it instead of the Triton kernels.
    """
    call, _ = OPERATIONS[case.op]
    inputs = call(case)
    forced = {"split_size": case.split_size, "multiprocessors": case.multiprocessors}
    if emulate is None:
        emulate, forced["least"], forced["hopper"] = emulated, 64, case.may_be_gluons
    if case.block_m:
        forced["block_m"] = case.block_m
    with emulate(arch, options or Options(), change, **forced) as launches:
        results = inputs()
    for result, (exact, by_torch, atol) in zip(results, expectations(case), strict=True):
        assert_accurate(result, exact, by_torch, atol=atol)
    return Outcome(list(results), launches)


@lru_cache(maxsize=4)
def expectations(case):
    """Return (float64 result, what PyTorch makes in the dtype, tolerance) for every result."""
    return OPERATIONS[case.op][1](case)


# Together and copies late; one warp after the other in some order, copies early, blocks shuffled.
SCHEDULES = (Options(), Options(copies="issue", warps=1, blocks=1, count=False))
CUT_OFF = (Options(count=False, cut=True),)  # as coarse as tensor cores may be


def check(case, arch, schedules=SCHEDULES[:1], emulate=None):
    """Execute a case in several orders, which must agree in every bit; return the counts."""
    first, *others = (run(case, arch, options, emulate=emulate) for options in schedules)
    assert all(other.same_bits(first) for other in others), "the order shows in the result"
    return [(launched.name, launched.counts) for launched in first.launches]
