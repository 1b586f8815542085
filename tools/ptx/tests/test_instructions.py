"""Every class of instructions against a numpy formula."""

import numpy as np
import pytest

from ..faults import Fault, Unsupported
from ..floats import from_bf16, to_bf16
from .snippets import execute, per_thread, pointer

N = 64
RANDOM = np.random.default_rng(0)
U32 = RANDOM.integers(0, 2**32, N, dtype=np.uint32)
V32 = RANDOM.integers(0, 2**32, N, dtype=np.uint32)
U64 = RANDOM.integers(0, 2**63, N, dtype=np.uint64)
S64 = np.concatenate([U64[:32], ~U64[32:]]).view(np.int64)
SMALL = RANDOM.integers(0, 32, N, dtype=np.uint32)
F32 = RANDOM.standard_normal(N).astype(np.float32)
G32 = RANDOM.standard_normal(N).astype(np.float32)
H32 = np.where(np.arange(N) % 5 == 0, np.float32("nan"), F32)
S32, T32 = U32.view(np.int32), V32.view(np.int32)
# Divisors that are small, and dividends of both signs.
DIVISOR = (RANDOM.integers(1, 1000, N) * RANDOM.choice([-1, 1], N)).astype(np.int32)

INTEGERS = [
    ("add.s32 %d, %a, %b;", (S32, T32), S32 + T32),
    ("sub.s32 %d, %a, %b;", (S32, T32), S32 - T32),
    ("add.s64 %d, %a, %b;", (U64, U64), U64 + U64),
    ("mul.lo.s32 %d, %a, %b;", (S32, T32), S32 * T32),
    ("mul.hi.u32 %d, %a, %b;", (U32, V32), (U32.astype("u8") * V32 >> np.uint64(32)).astype("u4")),
    ("mul.wide.s32 %d, %a, %b;", (S32, T32), S32.astype("i8") * T32),
    ("mad.wide.u32 %d, %a, 4, %b;", (U32, U64), U32.astype("u8") * np.uint64(4) + U64),
    ("mad.lo.s32 %d, %a, %b, %c;", (S32, T32, S32), S32 * T32 + S32),
    ("div.s32 %d, %a, %b;", (S32, DIVISOR), np.trunc(S32 / DIVISOR.astype("f8")).astype("i4")),
    ("rem.s32 %d, %a, %b;", (S32, DIVISOR), np.fmod(S32, DIVISOR)),
    ("div.u32 %d, %a, 7;", (U32,), U32 // 7),
    ("min.s32 %d, %a, %b;", (S32, T32), np.minimum(S32, T32)),
    ("max.u32 %d, %a, %b;", (U32, V32), np.maximum(U32, V32)),
    ("abs.s32 %d, %a;", (S32,), np.abs(S32)),
    ("neg.s32 %d, %a;", (S32,), -S32),
    ("popc.b32 %d, %a;", (U32,), np.array([x.bit_count() for x in U32.tolist()], "u4")),
    ("clz.b32 %d, %a;", (SMALL,), np.array([32 - x.bit_length() for x in SMALL.tolist()], "u4")),
]
BITS = [
    ("and.b32 %d, %a, %b;", (U32, V32), U32 & V32),
    ("or.b64 %d, %a, %b;", (U64, U64), U64),
    ("xor.b32 %d, %a, 255;", (U32,), U32 ^ np.uint32(255)),
    ("not.b32 %d, %a;", (U32,), ~U32),
    ("shl.b32 %d, %a, %b;", (U32, SMALL), U32 << SMALL),
    ("shl.b32 %d, %a, 40;", (U32,), np.zeros(N, "u4")),
    ("shr.u32 %d, %a, %b;", (U32, SMALL), U32 >> SMALL),
    ("shr.s32 %d, %a, 40;", (S32,), S32 >> 31),
    ("shf.l.wrap.b32 %d, %a, %b, 8;", (U32, V32), V32 << np.uint32(8) | U32 >> np.uint32(24)),
    ("bfe.u32 %d, %a, 5, 7;", (U32,), U32 >> np.uint32(5) & np.uint32(127)),
    ("bfe.u64 %d, %a, 37, 11;", (U64,), U64 >> np.uint64(37) & np.uint64(2047)),
    ("bfe.u64 %d, %a, 0, 64;", (U64,), U64),
    ("bfe.s32 %d, %a, 27, 1;", (S32,), -(S32 >> 27 & 1)),
    ("bfe.s64 %d, %a, 0, 32;", (S64,), S64.astype("i4").astype("i8")),
    ("bfe.s64 %d, %a, 60, 40;", (S64,), S64 >> 60),
    ("bfi.b32 %d, %a, %b, 4, 8;", (U32, V32),
     V32 & ~np.uint32(0xFF0) | (U32 & 0xFF) << np.uint32(4)),
    ("prmt.b32 %d, %a, %b, 0x5410;", (U32, V32), U32 & 0xFFFF | V32 << np.uint32(16)),
    ("lop3.b32 %d, %a, %b, %c, 0xE8;", (U32, V32, U32[::-1].copy()),
     U32 & V32 | U32 & U32[::-1] | V32 & U32[::-1]),
    ("brev.b32 %d, %a;", (U32,), np.array([int(f"{x:032b}"[::-1], 2) for x in U32.tolist()], "u4")),
    ("{ .reg .b16 x, y; mov.b32 {x, y}, %a; mov.b32 %d, {y, x}; }", (U32,),
     U32 >> np.uint32(16) | U32 << np.uint32(16)),
]  # fmt: skip
BF, HF = to_bf16(F32), F32.astype(np.float16)
LARGE = (F32 * 1e10).astype(np.float32)
FLOATS = [
    ("add.f32 %d, %a, %b;", (F32, G32), F32 + G32),
    ("fma.rn.f32 %d, %a, %b, %c;", (F32, G32, F32),
     (F32.astype("f8") * G32 + F32).astype("f4")),
    ("div.full.f32 %d, %a, %b;", (F32, G32), F32 / G32),
    ("max.f32 %d, %a, %b;", (H32, G32), np.fmax(H32, G32)),
    ("max.NaN.f32 %d, %a, %b;", (H32, G32), np.maximum(H32, G32)),
    ("ex2.approx.ftz.f32 %d, %a;", (F32,), np.exp2(F32.astype("f8")).astype("f4")),
    ("lg2.approx.f32 %d, %a;", (np.abs(F32),), np.log2(np.abs(F32).astype("f8")).astype("f4")),
    ("sqrt.rn.f32 %d, %a;", (np.abs(F32),), np.sqrt(np.abs(F32))),
    ("mul.ftz.f32 %d, %a, 0f00000001;", (F32,), np.copysign(np.float32(0), F32)),
    ("add.rn.bf16x2 %d, %a, %b;", (BF.view("u4"), BF[::-1].copy().view("u4")),
     to_bf16(from_bf16(BF) + from_bf16(BF[::-1])).view("u4")),
    ("mul.f16 %d, %a, %b;", (HF, HF), HF * HF),
]  # fmt: skip
CONVERSIONS = [
    ("cvt.rn.bf16x2.f32 %d, %a, %b;", (F32, G32), to_bf16(F32).astype("u4") << 16 | to_bf16(G32)),
    ("cvt.rn.f16.f32 %d, %a;", (F32,), HF),
    ("cvt.f32.bf16 %d, %a;", (BF,), from_bf16(BF)),
    ("cvt.s64.s32 %d, %a;", (S32,), S32.astype("i8")),
    ("cvt.u64.u32 %d, %a;", (U32,), U32.astype("u8")),
    ("cvt.u16.u32 %d, %a;", (U32,), U32.astype("u2")),
    ("cvt.rn.f32.s32 %d, %a;", (S32,), S32.astype("f4")),
    ("cvt.rzi.s32.f32 %d, %a;", (F32 * 100,), np.trunc(F32 * 100).astype("i4")),
    ("cvt.rzi.s32.f32 %d, %a;", (LARGE,),
     np.clip(LARGE.astype("f8"), -(2**31), 2**31 - 1).astype("i4")),
]  # fmt: skip
SETP = "{ .reg .pred x; setp.%s x, %%a, %%b; selp.b32 %%d, 1, 0, x; }"
COMPARISONS = [
    (SETP % "lt.s32", (S32, T32), (S32 < T32).astype("u4")),
    (SETP % "hi.u32", (U32, V32), (U32 > V32).astype("u4")),
    (SETP % "neu.f32", (H32, F32), (~(H32 == F32)).astype("u4")),
    (SETP % "ne.f32", (H32, F32), np.zeros(N, "u4")),
    (SETP % "gtu.f32", (H32, G32), (~(H32 <= G32)).astype("u4")),
    (SETP % "num.f32", (H32, G32), (~np.isnan(H32)).astype("u4")),
    (SETP % "nan.bf16", (to_bf16(H32), BF), np.isnan(H32).astype("u4")),
    (SETP % "lt.bf16", (BF, to_bf16(G32)), (from_bf16(BF) < from_bf16(to_bf16(G32))).astype("u4")),
    (SETP % "geu.f16", (HF, H32.astype("f2")), (~(H32.astype("f2") > HF)).astype("u4")),
]
ALL = INTEGERS + BITS + FLOATS + CONVERSIONS + COMPARISONS


@pytest.mark.parametrize(("instruction", "inputs", "expected"), ALL, ids=[case[0] for case in ALL])
def test_per_thread(instruction, inputs, expected):
    expected = np.asarray(expected)
    count = min(len(x) for x in inputs)
    actual = per_thread(instruction, [x[:count] for x in inputs], expected.dtype)
    np.testing.assert_array_equal(actual, expected[:count])


# Where a field begins and how long it is: at the ends of words, beyond them, and of no bit.
FIELDS = [(at, n) for at in (0, 1, 30, 31, 32, 33, 62, 63, 64, 200) for n in (0, 1, 31, 32, 63, 64)]
FIELDS += [(at + 256, n + 512) for at, n in FIELDS[:4]]  # only the lowest eight bits count


def extracted(kind, value, at, length):
    """Return a bit field as the PTX ISA defines `bfe`, bit by bit."""
    msb = int(kind[1:]) - 1
    at, length = at & 0xFF, length & 0xFF
    sign = value >> min(at + length - 1, msb) & 1 if kind[0] == "s" and length else 0
    bits = [value >> (at + i) & 1 if i < length and at + i <= msb else sign for i in range(msb + 1)]
    return sum(bit << i for i, bit in enumerate(bits))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(kind):
    dtype = f"u{int(kind[1:]) // 8}"
    fields = [(value, *field) for value in (S64[0], S64[40]) for field in FIELDS]
    values, at, length = (np.array(x) for x in zip(*fields, strict=True))
    values = values.astype(dtype)
    expected = [
        extracted(kind, int(value), *field)
        for value, (_, *field) in zip(values, fields, strict=True)
    ]
    inputs = (values, at.astype("u4"), length.astype("u4"))
    actual = per_thread(f"bfe.{kind} %d, %a, %b, %c;", inputs, dtype)
    np.testing.assert_array_equal(actual, np.array(expected, dtype))


LANE = np.arange(N) % 32
WARP = np.arange(N) // 32
EXCHANGES = [
    ("shfl.sync.bfly.b32 %d, %a, 5, 31, -1;", U32[32 * WARP + (LANE ^ 5)]),
    ("shfl.sync.idx.b32 %d, %a, 3, 31, -1;", U32[32 * WARP + 3]),
    ("shfl.sync.up.b32 %d, %a, 2, 0, -1;", U32[32 * WARP + np.where(LANE < 2, LANE, LANE - 2)]),
    ("shfl.sync.down.b32 %d, %a, 4, 31, -1;", U32[32 * WARP + np.where(LANE > 27, LANE, LANE + 4)]),
    ("shfl.sync.bfly.b32 %d, %a, 4, 0x1807, -1;", U32[32 * WARP + (LANE ^ 4)]),
    ("redux.sync.add.s32 %d, %a, -1;", U32.reshape(2, 32).sum(1, dtype="u4")[WARP]),
    ("redux.sync.min.u32 %d, %a, -1;", U32.reshape(2, 32).min(1)[WARP]),
    ("{ .reg .pred x; setp.lt.u32 x, %a, 0x80000000; vote.sync.ballot.b32 %d, x, -1; }",
     ((U32 < 2**31).reshape(2, 32) << LANE[:32]).sum(1).astype("u4")[WARP]),
    ("{ .reg .pred x; setp.ne.u32 x, %a, 0; vote.sync.all.pred x, x, -1; selp.b32 %d, 1, 0, x; }",
     (U32 != 0).reshape(2, 32).all(1).astype("u4")[WARP]),
    ("and.b32 %a, %a, 1; match.any.sync.b32 %d, %a, -1;",
     (((U32 & 1).reshape(2, 32)[:, :, None] == (U32 & 1).reshape(2, 32)[:, None, :])
      << LANE[:32]).sum(2).astype("u4").ravel()),
    ("{ .reg .pred x; elect.sync %d|x, -1; selp.b32 %d, 1, 0, x; }", (LANE == 0).astype("u4")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("instruction", "expected"), EXCHANGES, ids=[case[0] for case in EXCHANGES]
)
def test_exchange_between_lanes(instruction, expected):
    np.testing.assert_array_equal(per_thread(instruction, [U32], np.uint32), expected)


@pytest.mark.parametrize("vector", [1, 2, 4])
def test_vector_loads_and_stores_through_shared_memory(vector):
    x = RANDOM.integers(0, 2**32, 32 * vector, dtype=np.uint32)
    kind = f"v{vector}.b32" if vector > 1 else "b32"
    names = ", ".join(f"%r{i}" for i in range(vector))
    body = f"""{pointer("%q0", 0, 4 * vector)} {pointer("%q1", 1, 4 * vector)}
    ld.global.{kind} {{{names}}}, [%q0];
    mul.lo.u32 %r9, %r79, {4 * vector};
    st.shared.{kind} [%r9], {{{names}}};
    bar.sync 0;
    xor.b32 %r9, %r9, {4 * vector};
    ld.shared.{kind} {{{names}}}, [%r9];
    st.global.{kind} [%q1], {{{names}}};"""
    (_, out), _ = execute(body, x, np.zeros_like(x), shared=128 * vector)
    np.testing.assert_array_equal(out.reshape(-1, 2, vector), x.reshape(-1, 2, vector)[:, ::-1])


def test_signed_bytes_widen():
    x = RANDOM.integers(-128, 128, 32).astype(np.int8)
    body = f"""{pointer("%q0", 0, 1)} {pointer("%q1", 1, 4)}
    ld.global.s8 %r1, [%q0];
    st.global.b32 [%q1], %r1;"""
    (_, out), _ = execute(body, x, np.zeros(32, np.int32))
    np.testing.assert_array_equal(out, x)


def test_local_and_generic_addresses():
    body = f"""{pointer("%q1", 0, 4)}
    .local .align 8 .b8 depot[16];
    mov.b64 %q2, depot;
    cvta.local.u64 %q3, %q2;
    st.local.b32 [%q2+4], %r79;
    ld.b32 %r1, [%q3+4];
    st.b32 [%q1], %r1;"""
    (out,), _ = execute(body, np.zeros(32, np.uint32))
    np.testing.assert_array_equal(out, np.arange(32))


def test_sums_of_32_bit_addresses_wrap():
    """The compiler takes an offset out of a loop's address, which may then begin below 0."""
    body = f"""{pointer("%q1", 0, 4)}
    shl.b32 %r1, %tid.x, 2;
    st.shared.b32 [%r1], %r79;
    sub.u32 %r2, %r1, 32768;
    ld.shared.b32 %r3, [%r2+32768];
    st.global.b32 [%q1], %r3;"""
    (out,), _ = execute(body, np.zeros(32, np.uint32), shared=128)
    np.testing.assert_array_equal(out, np.arange(32))
    with pytest.raises(Fault, match="bounds"):
        execute(body.replace("+32768", "+32764"), np.zeros(32, np.uint32), shared=128)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [("add", 3 * 32), ("max", 3), ("exch", 3), ("inc", 0)],
)
def test_atomics(operation, expected):
    body = f"""ld.param.u64 %q0, [p0];
    atom.global.{operation}.u32 %r1, [%q0], 3;
    {pointer("%q1", 1, 4)}
    st.global.b32 [%q1], %r1;"""
    (total, old), _ = execute(body, np.zeros(1, np.uint32), np.zeros(32, np.uint32))
    assert total[0] == expected
    if operation == "add":
        np.testing.assert_array_equal(np.sort(old), 3 * np.arange(32))


def test_divergent_threads_meet_again():
    """Odd threads take a detour through a loop of as many turns as their number."""
    body = f"""{pointer("%q0", 0, 4)}
    mov.b32 %r1, 0; mov.b32 %r2, 0;
    and.b32 %r3, %r79, 1;
    setp.eq.b32 %p1, %r3, 0;
    @%p1 bra MEET;
LOOP:
    add.s32 %r1, %r1, %r2;
    add.s32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, %r79;
    @%p2 bra LOOP;
MEET:
    redux.sync.add.s32 %r4, 1, -1;
    add.s32 %r1, %r1, %r4;
    st.global.b32 [%q0], %r1;"""
    (out,), _ = execute(body, np.zeros(32, np.int32))
    t = np.arange(32)
    np.testing.assert_array_equal(out, np.where(t % 2, t * (t - 1) // 2, 0) + 32)


def test_branches_by_index():
    body = f"""{pointer("%q0", 0, 4)} and.b32 %r1, %r79, 3; setp.ne.u32 %p1, %r1, 3;
    mov.b32 %r2, 9;
    @%p1 brx.idx %r1, TABLE;
    bra END;
TABLE: .branchtargets ZERO, ONE, ONE;
ZERO: mov.b32 %r2, 100; bra END;
ONE: mov.b32 %r2, 101;
END: st.global.b32 [%q0], %r2;"""
    (out,), _ = execute(body, np.zeros(32, np.uint32))
    np.testing.assert_array_equal(out, np.array([100, 101, 101, 9])[np.arange(32) % 4])


def fragment_rows(i):
    """Return (rows, columns) of register ``i`` of a 16 x 8 float32 accumulator, by lane."""
    lane = np.arange(32)
    return lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2


# K of one instruction, float32 to the operand's bits, and the number that the bits mean.
MMA = {
    "bf16": (16, to_bf16, from_bf16),
    "f16": (16, lambda x: x.astype("f2").view("u2"), lambda x: x.view("f2").astype("f4")),
    "tf32": (8, lambda x: x.view("u4") & np.uint32(0xFFFFE000), lambda x: x.view("f4")),
}


@pytest.mark.parametrize("kind", MMA)
def test_mma(kind):
    """Fragments are laid out here by hand, row by row of the manual's figures."""
    depth, encode, decode = MMA[kind]
    a = encode(RANDOM.standard_normal((16, depth)).astype("f4"))
    b = encode(RANDOM.standard_normal((depth, 8)).astype("f4"))
    lane, per = np.arange(32), 2 if depth == 16 else 1
    g, q = lane // 4, lane % 4 * per

    def packed(get):
        return np.stack([get(i) for i in range(per)], -1).view(np.uint32)[..., 0]

    half = depth // 2
    fragments = [packed(lambda i, r=r, k=k: a[g + r, q + k + i]) for k in (0, half) for r in (0, 8)]
    fragments += [packed(lambda i, k=k: b[q + k + i, g]) for k in (0, half)]
    body = pointer("%q0", 0, 24) + pointer("%q1", 1, 16)
    body += "".join(f"ld.global.b32 %r{i}, [%q0+{4 * i}];" for i in range(6))
    body += f"""
    mov.b32 %r20, 0f3F800000;
    mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32
        {{%r10, %r11, %r12, %r13}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}},
        {{%r20, %r20, %r20, %r20}};
    st.global.v4.b32 [%q1], {{%r10, %r11, %r12, %r13}};"""
    inputs = np.ascontiguousarray(np.stack(fragments, 1))
    (_, out), _ = execute(body, inputs, np.zeros((32, 4), np.float32))
    expected = decode(a).astype("f8") @ decode(b).astype("f8") + 1
    for i in range(4):
        np.testing.assert_allclose(out[:, i], expected[fragment_rows(i)], rtol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(transposed):
    x = RANDOM.integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    trans = ".trans" if transposed else ""
    body = f"""{pointer("%q0", 0, 16)} {pointer("%q1", 1, 16)} {pointer("%q2", 2, 16)}
    ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%q0];
    shl.b32 %r9, %r79, 4;
    st.shared.v4.b32 [%r9], {{%r0, %r1, %r2, %r3}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r9];
    st.global.v4.b32 [%q1], {{%r4, %r5, %r6, %r7}};
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r9], {{%r4, %r5, %r6, %r7}};
    bar.warp.sync -1;
    ld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%r9];
    st.global.v4.b32 [%q2], {{%r0, %r1, %r2, %r3}};"""
    empty = np.zeros((32, 8), np.uint16)
    (_, fragments, back), _ = execute(body, x, empty, np.zeros_like(x), shared=512)
    tiles = x.swapaxes(1, 2) if transposed else x
    lane = np.arange(32)
    for i in range(4):
        for half in range(2):
            expected = tiles[i, lane // 4, lane % 4 * 2 + half]
            np.testing.assert_array_equal(fragments[:, 2 * i + half], expected)
    np.testing.assert_array_equal(back, tiles)


def test_an_unknown_instruction_is_named():
    for text in (
        "frobnicate.b32 %r1, %r2;",
        "add.rz.f32 %r1, %r1, %r1;",
        "add.cc.u32 %r1, %r1, 1;",
    ):
        with pytest.raises(Unsupported, match=f"unknown instruction: {text[:9]}"):
            execute(text)


def test_registers_declared_as_floats():
    """As NVRTC declares them."""
    x = np.arange(32, dtype=np.float32)
    body = f"""
    .reg .f32 %f<2>;
    {pointer("%q0", 0, 4)}
    ld.global.f32 %f0, [%q0];
    fma.rn.f32 %f1, %f0, %f0, 0f3F800000;
    {pointer("%q1", 1, 4)}
    st.global.f32 [%q1], %f1;"""
    (_, result), _ = execute(body, x, np.zeros_like(x))
    np.testing.assert_array_equal(result, x * x + 1)
