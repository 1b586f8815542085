"""mbarriers, bulk tensor copies and wgmma: right values, and what goes wrong without each wait."""

import numpy as np
import pytest

from ..bulk import TensorMap
from ..faults import Fault
from ..floats import from_bf16, to_bf16
from ..machine import Options
from .snippets import execute, pointer

RANDOM = np.random.default_rng(0)
SCHEDULES = [Options(), Options(copies="issue"), Options(warps=1), Options(warps=0, copies="issue")]


def fault(kind, body, *arrays, **options):
    with pytest.raises(Fault) as caught:
        execute(body, *arrays, **options)
    assert caught.value.kind == kind, caught.value


WAIT = """{{ .reg .pred done;
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity};
@!done bra AGAIN; }}"""

# Warp 0 produces 32 numbers, four times, into a buffer of two; warp 1 adds them up.
PIPELINE = """
    mov.u32 %r1, %tid.x;
    mov.b32 %r9, 256;
    setp.eq.b32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r9+8], 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r9+16], 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r9+24], 32;
    bar.sync 0;
    mov.b32 %r2, 0;
    setp.lt.u32 %p2, %r1, 32;
    and.b32 %r1, %r1, 31;
    @!%p2 bra CONSUMER;
PRODUCER:
    and.b32 %r3, %r2, 1;
    shl.b32 %r4, %r3, 7; shl.b32 %r5, %r1, 2; add.s32 %r4, %r4, %r5;
    shl.b32 %r5, %r3, 3; add.s32 %r5, %r5, 256;
    shr.u32 %r6, %r2, 1; xor.b32 %r6, %r6, 1; and.b32 %r6, %r6, 1;
    add.s32 %r8, %r5, 16;
    {wait_empty}
    mul.lo.u32 %r7, %r2, 100; add.s32 %r7, %r7, %r1;
    st.shared.b32 [%r4], %r7;
    mbarrier.arrive.shared::cta.b64 _, [%r5];
    add.s32 %r2, %r2, 1;
    setp.lt.u32 %p3, %r2, 4;
    @%p3 bra PRODUCER;
    bra END;
CONSUMER:
    mov.b32 %r10, 0;
NEXT:
    and.b32 %r3, %r2, 1;
    shl.b32 %r4, %r3, 7; shl.b32 %r5, %r1, 2; add.s32 %r4, %r4, %r5;
    shl.b32 %r5, %r3, 3; add.s32 %r5, %r5, 256;
    shr.u32 %r6, %r2, 1; and.b32 %r6, %r6, 1;
    {wait_full}
    ld.shared.b32 %r7, [%r4];
    add.s32 %r10, %r10, %r7;
    mbarrier.arrive.shared::cta.b64 _, [%r5+16];
    add.s32 %r2, %r2, 1;
    setp.lt.u32 %p3, %r2, 4;
    @%p3 bra NEXT;
    mov.b32 %r79, %r1;
    ld.param.u64 %q1, [p0]; mad.wide.u32 %q1, %r1, 4, %q1;
    st.global.b32 [%q1], %r10;
END:
"""


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_a_pipeline_of_mbarriers(options):
    waits = {
        "wait_empty": WAIT.format(barrier="%r8", parity="%r6"),
        "wait_full": WAIT.format(barrier="%r5", parity="%r6"),
    }
    call = {"threads": 64, "shared": 288, "options": options}
    out = np.zeros(32, np.uint32)
    (out,), _ = execute(PIPELINE.format(**waits), out, **call)
    np.testing.assert_array_equal(out, 600 + 4 * np.arange(32))
    for removed in waits:
        with pytest.raises(Fault):
            execute(PIPELINE.format(**(waits | {removed: ""})), out, **call)


def test_an_mbarrier_that_nobody_completes():
    body = """mov.u32 %r1, %tid.x; mov.b32 %r9, 0; setp.eq.b32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 2;
    bar.sync 0;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r9];"""
    fault("barrier", body + WAIT.format(barrier="%r9", parity=0), shared=8)


def swizzled(tile, swizzle):
    """Return the bytes of a tile [rows, swizzle / 2] of 16-bit elements as TMA lays them out."""
    rows, chunk = np.arange(len(tile))[:, None], np.arange(swizzle // 16)
    pattern = {128: rows % 8, 64: rows // 2 % 4, 32: rows // 4 % 2}[swizzle]
    out = np.empty((len(tile), swizzle // 16, 8), np.uint16)
    out[rows, chunk ^ pattern] = tile.reshape(len(tile), -1, 8)
    return out.reshape(tile.shape)


TMA = """
    mov.u32 %r1, %tid.x; mov.b32 %r9, 2048; mov.b32 %r10, 0; mov.b32 %r11, {x}; mov.b32 %r12, {y};
    setp.eq.b32 %p1, %r1, 0;
    mov.b64 %q2, m0; cvta.param.u64 %q2, %q2;
    mov.b64 %q3, m1; cvta.param.u64 %q3, %q3;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], {size};
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [%r10], [%q2, {{%r11, %r12}}], [%r9];
    {wait}
    {touch}
    {fence}
    bar.sync 0;
    mov.b32 %r13, 0;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%q3, {{%r13, %r13}}], [%r10];
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group.read 0;
"""
# Every thread increments a byte, by the generic proxy.
TOUCH = "ld.shared.u8 %h1, [%r1]; add.s16 %h1, %h1, 1; st.shared.u8 [%r1], %h1;"


@pytest.mark.parametrize("copies", ["issue", "wait"])
@pytest.mark.parametrize("swizzle", [128, 64, 32])
def test_bulk_tensor_copies(swizzle, copies):
    """A box that hangs over the tensor's edges, there and back."""
    x = RANDOM.integers(0, 2**16, (20, 80), dtype=np.uint16)
    out = np.zeros((8, swizzle // 2), np.uint16)

    def maps(source, target):
        box = (swizzle // 2, 8)
        yield TensorMap(source, 2, (80, 20), (160,), box, swizzle)
        yield TensorMap(target, 2, out.shape[::-1], (swizzle,), box, swizzle)

    landed = WAIT.format(barrier="%r9", parity=0)

    def run(wait=landed, touch=TOUCH, fence="fence.proxy.async;"):
        body = TMA.format(x=72, y=14, size=8 * swizzle, wait=wait, touch=touch, fence=fence)
        return execute(body, x, out, maps=maps, shared=2056, options=Options(copies=copies))[0][1]

    padded = np.zeros((40, 200), np.uint16)
    padded[:20, :80] = x
    expected = padded[14:22, 72 : 72 + swizzle // 2]
    np.testing.assert_array_equal(run(touch=""), expected)
    in_shared = swizzled(expected, swizzle).view(np.uint8).ravel()
    in_shared[:32] += 1
    rows = np.arange(8)[:, None]
    back = in_shared.view(np.uint16).reshape(8, -1, 8)
    pattern = {128: rows % 8, 64: rows // 2 % 4, 32: rows // 4 % 2}[swizzle]
    np.testing.assert_array_equal(
        run(), back[rows, np.arange(swizzle // 16) ^ pattern].reshape(8, -1)
    )
    for broken in ({"wait": ""}, {"fence": ""}):
        with pytest.raises(Fault, match="race"):
            run(**broken)


WGMMA = """
    {load}
    {fence_proxy}
    bar.sync 0;
    mov.b32 %r70, 0f3F800000;
    {zero}
    {fence}
    {products}
    wgmma.commit_group.sync.aligned;
    {wait}
    ld.param.u64 %q1, [p1]; mad.wide.u32 %q1, %r79, 32, %q1;
    st.global.v4.b32 [%q1], {{%r40, %r41, %r42, %r43}};
    st.global.v4.b32 [%q1+16], {{%r44, %r45, %r46, %r47}};
"""


def descriptor(start, leading, stride, swizzle):
    mode = {128: 1, 64: 2, 32: 3, 0: 0}[swizzle]
    return mode << 62 | stride >> 4 << 32 | leading >> 4 << 16 | start >> 4


@pytest.mark.parametrize("copies", ["issue", "wait"])
@pytest.mark.parametrize("swizzle", [128, 64, 32])
def test_wgmma(swizzle, copies):
    """A [64, K] and B [16, K] as wide as the swizzle; the accumulators start at 1."""
    depth = swizzle // 2
    a, b = (to_bf16(RANDOM.standard_normal((rows, depth)).astype("f4")) for rows in (64, 16))
    image = np.concatenate([swizzled(a, swizzle), swizzled(b, swizzle)]).view(np.uint8).ravel()
    image = np.concatenate([image, np.zeros(-len(image) % 2048, np.uint8)])
    start_b = 64 * swizzle
    load = pointer("%q0", 0, 16) + "shl.b32 %r69, %r79, 4;"
    for at in range(0, len(image), 2048):
        load += f"ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%q0+{at}];"
        load += f"st.shared.v4.b32 [%r69+{at}], {{%r0, %r1, %r2, %r3}};"
    accumulators = ", ".join(f"%r{40 + i}" for i in range(8))
    products = ""
    for k in range(0, 2 * depth, 32):
        products += f"mov.b64 %q4, {descriptor(k, 16, 8 * swizzle, swizzle)};"
        products += f"mov.b64 %q5, {descriptor(start_b + k, 16, 8 * swizzle, swizzle)};"
        products += f"""wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
            {{{accumulators}}}, %q4, %q5, 1, 1, 1, 0, 0;"""
    parts = {
        "load": load,
        "fence_proxy": "fence.proxy.async.shared::cta;",
        "zero": "".join(f"mov.b32 %r{40 + i}, %r70;" for i in range(8)),
        "fence": "wgmma.fence.sync.aligned;",
        "products": products,
        "wait": "wgmma.wait_group.sync.aligned 0;",
    }

    def run(**changes):
        body = WGMMA.format(**(parts | changes))
        out = np.zeros((128, 8), np.float32)
        call = {"threads": 128, "shared": len(image), "options": Options(copies=copies)}
        return execute(body, image, out, **call)[0][1]

    expected = from_bf16(a).astype("f8") @ from_bf16(b).astype("f8").T + 1
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    actual = run()
    for i in range(8):
        place = row + 8 * (i // 2 % 2), column + 8 * (i // 4) + i % 2
        np.testing.assert_allclose(actual[:, i], expected[place], rtol=1e-5, atol=1e-5)
    for broken, kind in (("fence_proxy", "race"), ("fence", "race"), ("wait", "undefined")):
        with pytest.raises(Fault, match=kind):
            run(**{broken: ""})
    too_early = "mov.b32 %r0, 0; st.shared.b32 [%r69], %r0;"
    with pytest.raises(Fault, match="race"):
        run(wait=too_early + parts["wait"])
    run(wait=parts["wait"] + "bar.sync 0;" + too_early)
