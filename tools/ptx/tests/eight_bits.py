"""What a subprocess does for the tests of caches of 8 bits: it counts, and looks at every code."""

import torch

import specattn

from ..launch import emulated
from ..machine import Options
from .case import Case
from .operations import OPERATIONS
from .types import EIGHT_BITS


def a_key(stored, rows, arch):
    """Return (instructions for a key of a head, passes of shared memory that conflicts add)."""
    call, _ = OPERATIONS["hybrid"]
    found = []
    for length in (512, 1536):  # what stands before and behind the loop is left out
        case = Case("hybrid", rows=rows, head_dim=128, lengths=(length,), kv_heads=1, stored=stored)
        run = call(case)
        with emulated(arch, split_size=4096) as launches:
            run()
        found.append(launches[0].counts)
    few, many = found
    conflicts = many.shared_conflicts - few.shared_conflicts
    return (many.total_instructions - few.total_instructions) / 1024, conflicts


def check_every_code(stored, dtype, arch):
    """Each code of a value is the number that it stands for, or AssertionError; NaN stays NaN.

    One request for every 128 codes, each with one key.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(2, 1, 1, 128)
    codes = codes.view(EIGHT_BITS[stored])
    lengths = torch.ones(2, dtype=torch.int32)
    q = torch.ones(2, 1, 4, 128, dtype=dtype)
    keys = torch.ones(2, 1, 1, 128).to(codes.dtype)
    scale = torch.ones(1)
    with emulated(arch, Options(count=False)):
        found, _ = specattn.sparse_gather_attention(
            q, keys, codes, torch.zeros(2, 1, dtype=torch.int32), lengths,
            k_scale=scale, v_scale=scale,
        )  # fmt: skip
    meant = codes.float().expand(2, 1, 4, 128).to(dtype)
    assert torch.equal(found.isnan(), meant.isnan())
    assert torch.equal(found.nan_to_num(7.0), meant.nan_to_num(7.0))
