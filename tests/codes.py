"""Weights of 8 and 4 bits as tests of kernels give them.

What says of which kind they are: 8, 4, or "e4m3" for floats of 8 bits.
"""

import torch

from specattn.quantised import pack_nibbles

FLOATS = torch.tensor([x for x in range(256) if x & 0x7F != 0x7F], dtype=torch.uint8)
"""All floats of 8 bits but NaN, as bytes."""

FLOAT_FORMS = [
    (32, 1),
    (33, 1),
    (128, 1),
    (192, 2),
    (300, 3),
    (1024, 8),
    (2304, 18),
    (2240, 18),
    (901, 1),
]
"""K and groups of floats, of every size that kernels tell apart."""


def floats(outputs, depth, groups, scale_dtype, seed):
    """Return codes that are floats of 8 bits, the smallest too, scales, and no zero points."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(0, len(FLOATS), (outputs, depth), generator=generator)
    scale = (torch.rand(outputs, groups, generator=generator) - 0.4) * depth**-0.5 / 64
    scale[::3, 0] = 0
    return FLOATS[places].view(torch.float8_e4m3fn), scale.to(scale_dtype), None


def weights(outputs, depth, groups, bits, zeros, scale_dtype, seed):
    """Return codes, packed where they are of 4 bits, scales and zero points; floats have none."""
    if bits == "e4m3":
        return floats(outputs, depth, groups, scale_dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    low, high = (-128, 128) if bits == 8 else (0, 16)
    codes = torch.randint(low, high, (outputs, depth), generator=generator)
    zero = torch.randint(low, high, (outputs, groups), generator=generator)
    size = depth**-0.5 / (64 if bits == 8 else 4)
    scale = (torch.rand(outputs, groups, generator=generator) - 0.4) * size
    if bits == 8:
        codes, zero = codes.to(torch.int8), zero.to(torch.int8)
    else:
        codes, zero = pack_nibbles(codes), zero.to(torch.uint8)
    return codes, scale.to(scale_dtype), zero if zeros else None


def apart_in_words(codes):
    """Return codes whose rows lie apart, on multiples of four bytes where they are packed."""
    if codes is None:
        return None
    room = codes.new_zeros(len(codes), codes.shape[1] + (4 if codes.dtype == torch.uint8 else 5))
    room[:, : codes.shape[1]] = codes
    return room[:, : codes.shape[1]]


def grouped_by_columns(tensors):
    """Return scales or zero points [N, groups] whose groups lie side by side, as on a GPU."""
    return [t if t is None else t.t().contiguous().t() for t in tensors]
