"""Codes of weights: their packing and what they mean, written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.reference._codes import of_tiles, packed_bytes, to_tiles

from specattn.quantised import QuantisedWeight, pack_nibbles, quantise, unpack_nibbles


@given(st.integers(1, 5), st.integers(1, 400), st.integers(0, 99))
def test_packing_and_back(rows, depth, seed):
    codes = torch.randint(0, 16, (rows, depth), generator=torch.Generator().manual_seed(seed))
    packed = pack_nibbles(codes)
    assert packed.shape == (rows, packed_bytes(depth))
    assert torch.equal(unpack_nibbles(packed, depth).long(), codes)


def test_where_a_code_lies():
    """As the documentation says: word j holds codes j, 32 + j, 64 + j, 96 + j."""
    codes = torch.randint(0, 16, (1, 256))
    words = pack_nibbles(codes).view(torch.int16)[0].int() & 0xFFFF
    for k in range(256):
        block, place = divmod(k, 128)
        assert words[32 * block + place % 32] >> 4 * (place // 32) & 15 == codes[0, k]


@pytest.mark.parametrize("bits", [8, 4])
def test_where_a_code_lies_in_a_tile(bits):
    """As csrc/cpu/codes.h says: of 8 bits by bytes, of 4 even ones in the lower half of a word."""
    codes = torch.randint(0, 16, (48, 72))
    kept = codes.to(torch.int8) if bits == 8 else pack_nibbles(codes)
    tiles = to_tiles(kept, 72)
    assert tiles.shape == (48, 72 * bits // 32)
    words = tiles.view(3, -1, 16)  # [tile, word of a row, row]
    for n in range(48):
        for k in range(72):
            word, place = divmod(k, 32 // bits)
            shift = 8 * place if bits == 8 else 16 * (place % 2) + 4 * (place // 2)
            code = words[n // 16, word, n % 16].item() >> shift & (255 if bits == 8 else 15)
            assert code == codes[n, k]
    assert torch.equal(of_tiles(tiles, 72), kept)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_what_codes_mean(bits, zeros):
    codes = torch.randint(0, 16, (3, 64))
    scale, zero = torch.randn(3, 2), torch.randint(0, 16, (3, 2))
    kept = pack_nibbles(codes) if bits == 4 else codes.to(torch.int8)
    dtype = torch.uint8 if bits == 4 else torch.int8
    few = QuantisedWeight(kept, scale, zero.to(dtype) if zeros else None, 64)
    for n in range(3):
        for k in range(64):
            middle = zero[n, k // 32] if zeros else 8 if bits == 4 else 0
            meant = (codes[n, k] - middle).double() * scale[n, k // 32].double()
            assert few.dequantised(torch.float64)[n, k] == meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, None])
def test_rounding_to_the_nearest(dtype, group):
    weight = torch.randn(7, 96).to(dtype)
    weight[3] = 0
    for bits, steps in ((8, 254), (4, 15)):
        few = quantise(weight, bits, group)
        assert few.scale.dtype == torch.bfloat16
        wide = quantise(weight.float(), bits, group)
        assert torch.equal(wide.codes, few.codes)
        assert torch.equal(wide.scale, few.scale)
        error = (few.dequantised(torch.float32) - weight.float()).abs()
        size = weight.float().abs().unflatten(1, (-1, group or 96)).amax(-1, keepdim=True)
        # Half a step; at the far end of 4 bits, which ends below zero's mirror, a whole one.
        most = (1.02 if bits == 8 else 2.1) * size / steps
        assert (error.unflatten(1, (-1, group or 96)) <= most).all()
        assert (few.dequantised(dtype)[3] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "^bits: expected 8 or 4, got 3"),
        ({"group": 48}, "^group: expected a divisor of K=64, got 48"),
        ({"weight": torch.full((2, 64), torch.inf)}, "^weight: expected finite numbers"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        quantise(**{"weight": torch.ones(2, 64), "bits": 8, "group": 64} | change)
