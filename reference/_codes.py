"""Weights of 8 and 4 bits: a code less its zero point, times a scale, is the number that is meant.

Codes of 8 bits are int8 [N, K]. Codes of 4 bits lie in uint8 [N, 64 ceil(K / 128)]: a block of 128
codes is 32 words of 16 bits, of which word j holds codes j, 32 + j, 64 + j and 96 + j from its
lowest bits on. Scales are [N, groups], each for K / groups neighbours; zero points likewise, with
the type of the codes. Without any they are 0, and 8 for codes of 4 bits.

Floats of 8 bits, float8_e4m3fn [N, K], have no zero points, and a scale for 128 neighbours, of
which the last group may have fewer, or one for the row.

In tiles codes are int32 [N, K / 4], or of 4 bits [N, K / 8]: each word holds neighbours of one row,
those of 8 bits from its lowest byte on, those of 4 the even ones in its lower half, the odd ones in
its upper half. What is called 16 rows then lies as a matrix [words of a row, 16], so that vectors
have a lane for each row; scales and zero points of 16 rows lie as [groups, 16].
"""

import torch

BLOCK = 128  # codes of 4 bits that are packed together, floats of 8 that share a scale
TILE = 16  # rows whose words lie side by side
_CHUNK = 32
MIDDLE = 8  # the zero point of 4-bit codes without any


def packed_bytes(depth):
    """Return the bytes of a row of so many codes of 4 bits."""
    return -(-depth // BLOCK) * BLOCK // 2


def pack_nibbles(codes):
    """Return codes 0 .. 15 [N, K] of any integral type as uint8 [N, 64 ceil(K / 128)]."""
    rows, depth = codes.shape
    whole = torch.zeros(rows, 2 * packed_bytes(depth), dtype=torch.uint8, device=codes.device)
    whole[:, :depth] = codes & 15
    parts = whole.view(rows, -1, 4, _CHUNK)
    low, high = parts[:, :, 0] | parts[:, :, 1] << 4, parts[:, :, 2] | parts[:, :, 3] << 4
    return torch.stack([low, high], -1).view(rows, -1)


def unpack_nibbles(packed, depth):
    """Return the codes uint8 [N, K] that were packed, K being `depth`."""
    pairs = packed.view(len(packed), -1, _CHUNK, 2)
    low, high = pairs[..., 0], pairs[..., 1]
    parts = torch.stack([low & 15, low >> 4, high & 15, high >> 4], 2)
    return parts.view(len(packed), -1)[:, :depth]


def fits_tiles(rows, depth):
    """Return whether codes [N, K] make whole tiles."""
    return rows % TILE == 0 and depth % 8 == 0


def in_tiles(x):
    """Return a matrix [N, ..] with every 16 rows as a matrix of as many columns."""
    return x.unflatten(0, (-1, TILE)).mT.contiguous().view(x.shape)


def in_rows(x):
    """Return a matrix [N, ..] that lay in tiles."""
    return x.reshape(len(x) // TILE, x.shape[1], TILE).mT.contiguous().view(x.shape)


def to_tiles(codes, depth):
    """Return codes in tiles, int8 [N, K] or packed, K being `depth`."""
    if codes.dtype == torch.uint8:
        parts = unpack_nibbles(codes, depth).unflatten(1, (-1, 2, 2, 2))
        codes = (parts[:, :, :, 0] | parts[:, :, :, 1] << 4).mT.flatten(1)
    return in_tiles(codes.contiguous().view(torch.int32))


def of_tiles(tiles, depth):
    """Return what `to_tiles` was given."""
    words = in_rows(tiles)
    if words.shape[1] * 4 == depth:
        return words.view(torch.int8)
    parts = words.view(torch.uint8).unflatten(1, (-1, 2, 2)).mT
    return pack_nibbles(torch.stack([parts & 15, parts >> 4], 3).flatten(1))


def dequantised(codes, scale, zero, depth, dtype):
    """Return the weights [N, K] that codes mean, in a dtype that must hold them."""
    if codes.dtype == torch.float8_e4m3fn:
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(BLOCK, 1)[:, :depth]
        return codes.to(dtype) * scale.to(dtype)
    if codes.dtype == torch.int32:
        rest = (x if x is None else in_rows(x) for x in (scale, zero))
        return dequantised(of_tiles(codes, depth), *rest, depth, dtype)
    nibbles = codes.dtype == torch.uint8
    wide = (unpack_nibbles(codes, depth) if nibbles else codes).to(dtype)
    groups = wide.unflatten(-1, (scale.shape[1], -1))
    zero = (MIDDLE if nibbles else 0) if zero is None else zero.to(dtype)[..., None]
    return ((groups - zero) * scale.to(dtype)[..., None]).flatten(1)
