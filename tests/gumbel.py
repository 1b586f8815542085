"""One property of `add_gumbel_noise` for every backend: the reference's noise, rounded."""

import torch
from hypothesis import strategies as st

import specattn
from specattn import reference

PROBLEMS = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 4),
        "vocabulary": st.sampled_from([1, 255, 256, 1023, 1024, 1025, 2500]) | st.integers(1, 3000),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        "seed": st.integers(0, 2**64 - 1),
        "first": st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 5]) | st.integers(0, 2**20),
        "strided": st.booleans(),
    }
)
# -ln(-ln(u)) of two roundings each, at most 22 in size.
TOLERANCE = 4e-6


def check(rows, vocabulary, dtype, seed, first, strided, device="cpu"):
    """Compare the backend in use with the reference in float64, on logits of size one."""
    generator = torch.Generator().manual_seed(vocabulary)
    width = vocabulary + 5 if strided else vocabulary
    logits = torch.randn(rows, width, generator=generator).to(dtype)[:, :vocabulary]
    logits[:, vocabulary // 2 :: 7] = -torch.inf
    requests = first + torch.arange(rows)
    positions = first + 3 * torch.arange(rows).flip(0)
    out = torch.full((rows, width), torch.nan, device=device)[:, :vocabulary]
    arguments = [x.to(device) for x in (logits, requests, positions)]
    found = specattn.add_gumbel_noise(arguments[0], seed, *arguments[1:], out=out)
    assert found is out
    exact = reference.add_gumbel_noise(logits.double(), seed, requests, positions)
    masked = exact == -torch.inf
    assert torch.equal(found.cpu() == -torch.inf, masked)
    error = (found.cpu().double() - exact)[~masked].abs()
    assert not error.numel() or error.max() <= TOLERANCE
