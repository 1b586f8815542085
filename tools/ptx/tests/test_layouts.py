"""The emulator's layouts of matrices against the tables of `layouts`, element by element."""

import numpy as np
import pytest

from ..bulk import TensorMap
from ..matrices import fragments_c, tile_a, tile_b, tile_c
from ..warpgroup import Descriptor
from . import layouts
from .snippets import execute, pointer


def numbered(registers, elements):
    """Return fragments [1, registers, 32, elements] that hold 100 * lane + element."""
    lane = np.arange(32)[None, None, :, None]
    element = np.arange(registers * elements).reshape(1, registers, 1, elements)
    return 100 * lane + element


@pytest.mark.parametrize(
    ("gathered", "registers", "elements", "places"),
    [
        (lambda x: tile_a(x)[0], 4, 2, layouts.held(layouts.A_M16K16)),
        (lambda x: tile_b(x)[0].T, 2, 2, layouts.held(layouts.B_K16N8, transposed=True)),
        (lambda x: tile_c(x)[0], 4, 1, layouts.held(layouts.C_M16N8)),
        (lambda x: tile_c(x)[0], 12, 1, layouts.held(layouts.D_M16N24)),
    ],
    ids=["A of mma.m16n8k16", "B of mma.m16n8k16", "C of mma.m16n8k16", "D of wgmma.m64n24k16"],
)
def test_fragments(gathered, registers, elements, places):
    tile = gathered(numbered(registers, elements))
    assert tile.size == len(places)
    for at, (lane, element) in places.items():
        assert tile[at] == 100 * lane + element, at


def test_accumulators_go_back_where_they_came_from():
    """Of a warpgroup, whose warps have 16 rows each."""
    tile = np.arange(64 * 24).reshape(4, 16, 24)
    registers = fragments_c(tile)
    for (row, column), (lane, element) in layouts.held(layouts.D_M16N24).items():
        for warp in range(4):
            assert registers[element, 32 * warp + lane] == tile[warp, row, column]


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    """Rows lie in any order: which lane names one decides."""
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 2**16, (32, 8), dtype=np.uint16)
    place = generator.permutation(32).astype(np.uint32)  # of the row that a lane names
    body = f"""{pointer("%q0", 0, 16)} {pointer("%q1", 1, 4)} {pointer("%q2", 2, 16)}
    ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%q0]; shl.b32 %r9, %r79, 4;
    st.shared.v4.b32 [%r9], {{%r0, %r1, %r2, %r3}}; bar.warp.sync -1;
    ld.global.b32 %r8, [%q1]; shl.b32 %r8, %r8, 4;
    ldmatrix.sync.aligned.m8n8.x4{".trans" * transposed}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r8];
    st.global.v4.b32 [%q2], {{%r4, %r5, %r6, %r7}};"""
    (_, _, out), _ = execute(body, rows, place, np.zeros((32, 4, 2), np.uint16), shared=512)
    for matrix, lanes in layouts.NAMING.items():
        tile = rows[place[list(lanes)]]
        tile = tile.T if transposed else tile
        for at, (lane, element) in layouts.held({0: (0, 0)}).items():
            assert out[lane, matrix, element] == tile[at], (matrix, at)


@pytest.mark.parametrize("swizzle", layouts.SWIZZLES)
def test_swizzles_of_tensor_copies(swizzle):
    """Where TMA puts a box of 16 lines, in the table's words."""
    width = swizzle or 128
    box = TensorMap(
        0, 2, (width // 2, 2048 // width), (width,), (width // 2, 2048 // width), swizzle
    )
    expected = [layouts.swizzled(at, swizzle) for at in range(0, 2048, 2)]
    assert box.shared(0).tolist() == expected


def bits_of(**fields):
    """Return a descriptor by the table of its bits."""
    bits = 0
    for name, value in fields.items():
        first, count = layouts.DESCRIPTOR[name]
        assert value < 1 << count
        bits |= value << first
    return bits


@pytest.mark.parametrize("swizzle", layouts.MODES)
def test_descriptors(swizzle):
    fields = {"start": 0x123, "leading": 0x3ABC, "stride": 0x2001}
    found = Descriptor.of(bits_of(**fields, swizzle=layouts.MODES[swizzle]))
    units = {name: 16 * value for name, value in fields.items()}
    assert vars(found) == units | {"swizzle": swizzle or 16}


CANONICAL = [("K", *x) for x in layouts.K_MAJOR.items()]
CANONICAL += [("MN", *x) for x in layouts.MN_MAJOR.items()]


@pytest.mark.parametrize(("major", "swizzle", "layout"), CANONICAL, ids=lambda x: str(x)[:3])
@pytest.mark.parametrize("size", [2, 4])
def test_canonical_layouts(major, swizzle, layout, size):
    """Every element of an operand [64, K] that a descriptor names, with offsets as they may be."""
    if major == "MN" and size == 4:
        pytest.skip("wgmma transposes elements of 16 bits alone")
    start, offsets = 2048, {"LBO": 8192, "SBO": 1024 if swizzle else 128}
    depth = 32 // size
    descriptor = Descriptor.of(
        bits_of(
            start=start // 16,
            leading=offsets["LBO"] // 16,
            stride=offsets["SBO"] // 16,
            swizzle=layouts.MODES[swizzle],
        )
    )
    found = descriptor.addresses(64, depth, size, major == "MN")
    for i in range(64):
        for k in range(depth):
            at = start + layouts.spread(layout, (i, k), size, **offsets)
            assert found[i, k] == layouts.swizzled(at, swizzle), (i, k)
