"""Weights of 8 and 4 bits as tests of kernels give them."""

import torch

from specattn.quantised import pack_nibbles


def weights(outputs, depth, groups, bits, zeros, scale_dtype, seed):
    """Return codes, packed where they are of 4 bits, scales and zero points."""
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
