"""Where matrices lie in registers and in shared memory: figures of the PTX ISA (9.2) as tables.

The emulator computes these places by formulas of its own; here they are written out.
"""

# Of 8 x 8 elements of 16 bits, or of an accumulator's float32: the lane that holds each.
# "Warp-level matrix load instruction: ldmatrix" (9.7.14.5.15) and all the fragments below.
LANES = """
 0  0  1  1  2  2  3  3
 4  4  5  5  6  6  7  7
 8  8  9  9 10 10 11 11
12 12 13 13 14 14 15 15
16 16 17 17 18 18 19 19
20 20 21 21 22 22 23 23
24 24 25 25 26 26 27 27
28 28 29 29 30 30 31 31"""

# Where each 8 x 8 elements begin, (row, column), by the number of the first of a lane's two.
# "Matrix Fragments for mma.m16n8k16 with floating point type" (9.7.14.5.8); B is K x N, and its
# two elements lie in one column, so its lanes are those of the transposed table.
A_M16K16 = {0: (0, 0), 2: (8, 0), 4: (0, 8), 6: (8, 8)}
B_K16N8 = {0: (0, 0), 2: (8, 0)}
C_M16N8 = {0: (0, 0), 2: (8, 0)}
# "Matrix Fragments for wgmma.mma_async.m64nNk16" (9.7.15.5.1.1.1): a warp has 16 rows, N = 24 here.
D_M16N24 = {0: (0, 0), 2: (8, 0), 4: (0, 8), 6: (8, 8), 8: (0, 16), 10: (8, 16)}
# "Warp-level matrix load instruction: ldmatrix": the lanes that name the rows of each matrix.
NAMING = {0: range(8), 1: range(8, 16), 2: range(16, 24), 3: range(24, 32)}

# The 16 bytes that lie at each place of a line of 128 bytes, by line; then it repeats.
# "Swizzling Modes" of tensors (5.5.7), which wgmma's operands share.
SWIZZLES = {
    128: """
0 1 2 3 4 5 6 7
1 0 3 2 5 4 7 6
2 3 0 1 6 7 4 5
3 2 1 0 7 6 5 4
4 5 6 7 0 1 2 3
5 4 7 6 1 0 3 2
6 7 4 5 2 3 0 1
7 6 5 4 3 2 1 0""",
    64: """
0 1 2 3 4 5 6 7
1 0 3 2 5 4 7 6
2 3 0 1 6 7 4 5
3 2 1 0 7 6 5 4""",
    32: """
0 1 2 3 4 5 6 7
1 0 3 2 5 4 7 6""",
    0: """
0 1 2 3 4 5 6 7""",
}

# "Matrix Descriptor Format" (9.7.15.5.1.2.2): the first bit and how many, in units of 16 bytes but
# for the last two.
DESCRIPTOR = {
    "start": (0, 14),
    "leading": (16, 14),
    "stride": (32, 14),
    "base offset": (49, 3),
    "swizzle": (62, 2),
}
MODES = {0: 0, 128: 1, 64: 2, 32: 3}

# "Canonical Layouts" (9.7.15.5.1.2.1.3): sizes of the coordinates of M or N and of K, then their
# strides, in elements; T of them are 16 bytes, None goes on. LBO and SBO are the descriptor's.
K_MAJOR = {
    0: (((8, None), ("T", 2)), (("T", "SBO"), (1, "LBO"))),
    32: (((8, None), ("T", 2)), (("2T", "SBO"), (1, "T"))),
    64: (((8, None), ("T", 2)), (("4T", "SBO"), (1, "T"))),
    128: (((8, None), ("T", 2)), (("8T", "SBO"), (1, "T"))),
}
MN_MAJOR = {
    32: ((("T", 2, None), (8, None)), ((1, "T", "LBO"), ("2T", "SBO"))),
    64: ((("T", 4, None), (8, None)), ((1, "T", "LBO"), ("4T", "SBO"))),
    128: ((("T", 8, None), (8, None)), ((1, "T", "LBO"), ("8T", "SBO"))),
}


def table(text):
    """Return the numbers of a table, line by line."""
    return [[int(x) for x in line.split()] for line in text.strip().splitlines()]


def held(pieces, transposed=False):
    """Return {(row, column): (lane, its element)} of a fragment."""
    places = {}
    for first, (row, column) in pieces.items():
        for r, line in enumerate(table(LANES)):
            for c, lane in enumerate(line):
                at = (row + c, column + r) if transposed else (row + r, column + c)
                places[at] = lane, first + c % 2
    return places


def spread(layout, coordinates, size, **offsets):
    """Return the byte at which an element (M or N, K) lies, before it is swizzled."""
    per = 16 // size
    units = {"T": per} | {f"{i}T": i * per for i in (2, 4, 8)}
    units |= {name: bytes_ // size for name, bytes_ in offsets.items()}
    at = 0
    for x, sizes, strides in zip(coordinates, *layout, strict=True):
        for count, stride in zip(sizes, strides, strict=True):
            count = units.get(count, count)
            at += (x if count is None else x % count) * units.get(stride, stride)
            x = 0 if count is None else x // count
    return at * size


def swizzled(at, swizzle):
    """Return where a byte lies, by the table."""
    lines = table(SWIZZLES[swizzle])
    line = lines[at // 128 % len(lines)]
    return at // 128 * 128 + line.index(at // 16 % 8) * 16 + at % 16
