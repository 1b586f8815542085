"""Programs that are wrong by the PTX ISA: convicted in every order; their right twins run.

What `test_detectors.py` is for one instruction, these are for what goes between threads and units.
"""

import numpy as np
import pytest

from ..bulk import TensorMap
from ..faults import Fault
from ..floats import to_bf16
from ..machine import Options
from .snippets import execute, pointer
from .test_asynchronous import WAIT, descriptor, swizzled

ORDERS = [
    Options(),
    Options(copies="issue", warps=1, blocks=1),
    Options(warps=0),
    Options(warps=2, blocks=3, wave=1),
]
IN_EVERY_ORDER = pytest.mark.parametrize("options", ORDERS, ids=str)


def convicted(kind, run, *arguments):
    with pytest.raises(Fault) as caught:
        run(*arguments)
    assert caught.value.kind == kind, caught.value


# Every thread of four blocks leaves a number; the last block to count itself adds to one of each.
LAST_BLOCK = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 64, %r1;
    ld.param.u64 %q0, [p0]; ld.param.u64 %q1, [p1]; ld.param.u64 %q2, [p2];
    mad.wide.u32 %q3, %r3, 4, %q0; st.global.b32 [%q3], %r3;
    {before}
    mov.u32 %r9, smem; setp.ne.u32 %p1, %r1, 0; @%p1 bra WAITS;
    {count} %r4, [%q1], 3;
    st.shared.b32 [%r9], %r4;
WAITS: bar.sync 0;
    ld.shared.b32 %r4, [%r9]; setp.ne.u32 %p2, %r4, 3; @%p2 bra END;
    {after}
    xor.b32 %r5, %r3, 97; and.b32 %r5, %r5, 255; mad.wide.u32 %q4, %r5, 4, %q0;
    {load} %r6, [%q4]; add.u32 %r6, %r6, 1;
    mad.wide.u32 %q5, %r1, 4, %q2; st.global.b32 [%q5], %r6;
END:"""
RELAXED, ORDERED = "atom.global.inc.u32", "atom.acq_rel.gpu.global.inc.u32"
LOAD, BARRIER = "ld.global.b32", "bar.sync 0;"
FENCE = "membar.gl;"


def last_block(options, before, count, after, load):
    body = LAST_BLOCK.format(before=before, count=count, after=after, load=load)
    arrays = np.zeros(256, np.uint32), np.zeros(1, np.uint32), np.zeros(64, np.uint32)
    run = {"threads": 64, "grid": 4, "shared": 8, "undefined": (0,), "counters": (1,)}
    (_, _, out), _ = execute(body, *arrays, **run, options=options)
    assert (out > 0).all()


@IN_EVERY_ORDER
@pytest.mark.parametrize(
    ("before", "count", "after", "load"),
    [
        (FENCE + BARRIER, RELAXED, FENCE, LOAD),
        ("fence.acq_rel.gpu;" + BARRIER, RELAXED, "fence.acq_rel.gpu;" + BARRIER, LOAD),
        (BARRIER, ORDERED, "", LOAD),
        (FENCE + BARRIER, RELAXED, FENCE, "ld.global.cg.b32"),
    ],
)
def test_what_orders_blocks(options, before, count, after, load):
    last_block(options, before, count, after, load)


@IN_EVERY_ORDER
@pytest.mark.parametrize(
    ("before", "count", "after", "load"),
    [
        ("", RELAXED, "", LOAD),  # nothing at all
        (BARRIER, RELAXED, FENCE, LOAD),  # no fence before the counter
        (FENCE, RELAXED, FENCE, LOAD),  # the others' numbers may come behind the counter
        (FENCE + BARRIER, RELAXED, "", LOAD),  # no fence behind it
        (BARRIER + "fence.acq_rel.cta;", RELAXED, FENCE, LOAD),  # of the block alone
        ("", ORDERED, "", LOAD),  # orders the counting thread alone
        (BARRIER, "atom.release.gpu.global.inc.u32", "", LOAD),
        (BARRIER, "atom.acq_rel.cta.global.inc.u32", "", LOAD),
        (FENCE + BARRIER, RELAXED, FENCE, "ld.global.nc.b32"),  # what the launch itself writes
    ],
)
def test_blocks_that_nothing_orders(options, before, count, after, load):
    convicted("race", last_block, options, before, count, after, load)


def between_warps(options, between, distance=128):
    """Let each thread read what another one of its block has left in global memory."""
    body = f"""{pointer("%q0", 0, 4)} mov.u32 %r1, %tid.x; st.global.b32 [%q0], %r1; {between}
    xor.b32 %r2, %r1, {distance // 4}; ld.param.u64 %q1, [p0]; mad.wide.u32 %q1, %r2, 4, %q1;
    ld.global.b32 %r3, [%q1]; {pointer("%q2", 1, 4)} st.global.b32 [%q2], %r3;"""
    arrays = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    (_, out), _ = execute(body, *arrays, threads=64, options=options)
    np.testing.assert_array_equal(out, np.arange(64) ^ distance // 4)


@IN_EVERY_ORDER
def test_global_memory_within_a_block(options):
    between_warps(options, BARRIER)
    between_warps(options, "bar.warp.sync -1;", 4)
    convicted("race", between_warps, options, "")
    convicted("race", between_warps, options, "", 4)
    convicted("race", between_warps, options, FENCE)
    convicted("race", between_warps, options, "bar.warp.sync -1;")


def overwritten(options, between):
    """Read what another warp holds, and put something else where one's own was read."""
    body = f"""mov.u32 %r1, %tid.x; xor.b32 %r2, %r1, 32; ld.param.u64 %q0, [p0];
    mad.wide.u32 %q1, %r2, 4, %q0; ld.global.b32 %r3, [%q1]; {between}
    mad.wide.u32 %q2, %r1, 4, %q0; add.u32 %r3, %r3, 7; st.global.b32 [%q2], %r3;"""
    (out,), _ = execute(body, np.arange(64, dtype=np.uint32), threads=64, options=options)
    np.testing.assert_array_equal(out, (np.arange(64) ^ 32) + 7)


@IN_EVERY_ORDER
def test_global_memory_that_is_overwritten_before_it_was_read(options):
    overwritten(options, BARRIER)
    convicted("race", overwritten, options, "")


@IN_EVERY_ORDER
def test_two_blocks_may_write_the_same_value_but_not_two(options):
    body = "mov.u32 %r1, {}; ld.param.u64 %q0, [p0]; st.global.b32 [%q0], %r1;"
    call = {"grid": 4, "options": options}
    execute(body.format("7"), np.zeros(1, np.uint32), **call)
    convicted("race", lambda: execute(body.format("%ctaid.x"), np.zeros(1, np.uint32), **call))


def stored_by_tma(options, fence):
    """Two warps fill shared memory, and thread 0 copies it out."""
    body = f"""mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; mov.u32 %r5, smem; add.u32 %r2, %r2, %r5;
    setp.ge.u32 %p2, %r1, 32; setp.eq.u32 %p1, %r1, 0; ld.param.u64 %q0, [p0];
    st.shared.b32 [%r2], %r1; {fence}
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r5], 256;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group.read 0;"""
    (out,), _ = execute(body, np.zeros(64, np.uint32), threads=64, shared=256, options=options)
    np.testing.assert_array_equal(out, np.arange(64))


@IN_EVERY_ORDER
def test_a_proxy_fence_by_who_is_not_ordered_with_the_issuer(options):
    stored_by_tma(options, "fence.proxy.async; bar.sync 0;")
    stored_by_tma(options, "bar.sync 0; @%p1 fence.proxy.async;")
    convicted("race", stored_by_tma, options, "bar.sync 0; @%p2 fence.proxy.async;")


def left_operand(options, before, after, fencing=256):
    """Multiply 1 in registers of two warpgroups by a matrix; so many threads fence them before.

    They are overwritten before or behind the wait.
    """
    b = to_bf16(np.random.default_rng(0).standard_normal((16, 64)).astype("f4"))
    image = swizzled(b, 128).view(np.uint8).ravel()
    load = f"""{pointer("%q0", 0, 8)} shl.b32 %r69, %r79, 3;
        ld.global.v2.b32 {{%r0,%r1}}, [%q0]; st.shared.v2.b32 [%r69], {{%r0,%r1}};"""
    sums = ", ".join(f"%r{40 + i}" for i in range(8))
    ones = "".join(f"mov.b32 %r{20 + i}, 0x3F803F80;" for i in range(4))
    zeros = "".join(f"mov.b32 %r{40 + i}, 0f00000000;" for i in range(8))
    change = "mov.b32 %r20, 0;"
    body = f"""{load} fence.proxy.async.shared::cta; bar.sync 0; {zeros} {ones}
    setp.lt.u32 %p1, %r79, {fencing}; @%p1 wgmma.fence.sync.aligned;
    mov.b64 %q5, {descriptor(0, 16, 1024, 128)};
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{sums}}}, {{%r20,%r21,%r22,%r23}}, %q5,
        1, 1, 1, 0;
    wgmma.commit_group.sync.aligned; {change if before else ""}
    wgmma.wait_group.sync.aligned 0; {change if after else ""}"""
    execute(body, image, threads=256, shared=len(image), options=options)


@IN_EVERY_ORDER
def test_registers_that_wgmma_reads_are_its_own_until_the_wait(options):
    left_operand(options, False, True)
    convicted("race", left_operand, options, True, False)


@IN_EVERY_ORDER
def test_every_warpgroup_fences_its_registers(options):
    convicted("race", left_operand, options, False, True, 128)


def waiting(options, again):
    """Warp 1 reads what warp 0 has written, once an mbarrier says so."""
    body = f"""mov.u32 %r1, %tid.x; mov.b32 %r9, 256; setp.eq.b32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 32; bar.sync 0;
    setp.lt.u32 %p2, %r1, 32; shl.b32 %r2, %r1, 2; @!%p2 bra AGAIN;
    st.shared.b32 [%r2], %r1; mbarrier.arrive.shared::cta.b64 _, [%r9]; bra END;
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r9], 0; {again}
    and.b32 %r3, %r2, 127; ld.shared.b32 %r4, [%r3];
END:"""
    execute(body, threads=64, shared=264, options=options)


@IN_EVERY_ORDER
def test_try_wait_is_repeated_until_it_says_so(options):
    waiting(options, "@!%p3 bra AGAIN;")
    convicted("barrier", waiting, options, "")


def counted(options, between):
    """Copy a number per thread; thread 0 arrives, and all wait for the others' copies."""
    body = f"""{pointer("%q0", 0, 4)} mov.u32 %r1, %tid.x; mov.b32 %r9, 256; shl.b32 %r2, %r1, 2;
    setp.eq.b32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [%r9], 1; bar.sync 0;
    cp.async.ca.shared.global [%r2], [%q0], 4;
    cp.async.mbarrier.arrive.shared::cta.b64 [%r9]; {between}
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r9]; {WAIT.format(barrier="%r9", parity=0)}
    xor.b32 %r3, %r2, 128; ld.shared.b32 %r4, [%r3];
    {pointer("%q1", 1, 4)} st.global.b32 [%q1], %r4;"""
    arrays = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    (_, out), _ = execute(body, *arrays, threads=64, shared=264, options=options)
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)


@IN_EVERY_ORDER
def test_copies_count_before_a_phase_can_be_over(options):
    counted(options, BARRIER)
    with pytest.raises(Fault) as caught:
        counted(options, "")
    assert caught.value.kind in ("race", "undefined")  # where it has not been copied yet


def initialised(options, between):
    wait = WAIT.format(barrier="%r9", parity=0)
    body = f"""mov.u32 %r1, %tid.x; mov.b32 %r9, 256; setp.eq.b32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 64; {between}
    mbarrier.arrive.shared::cta.b64 _, [%r9]; {wait}"""
    execute(body, threads=64, shared=264, options=options)


@IN_EVERY_ORDER
def test_an_mbarrier_is_used_by_others_behind_a_barrier(options):
    initialised(options, BARRIER)
    with pytest.raises(Fault, match="race: use of the mbarrier|no mbarrier has been initialised"):
        initialised(options, "")


def boxed(options, place, stride):
    """Copy 8 rows of 64 elements to shared memory by TMA."""
    body = f"""mov.u32 %r1, %tid.x; mov.b32 %r9, 2048; mov.b32 %r10, {place}; mov.b32 %r11, 0;
    setp.eq.b32 %p1, %r1, 0; mov.b64 %q2, m0; cvta.param.u64 %q2, %q2;
    @%p1 mbarrier.init.shared::cta.b64 [%r9], 1; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 1024;
    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [%r10], [%q2, {{%r11, %r11}}], [%r9]; {WAIT.format(barrier="%r9", parity=0)}"""
    x = np.zeros((8, stride // 2), np.uint16)
    maps = lambda address: [TensorMap(address, 2, (64, 8), (stride,), (64, 8))]  # noqa: E731
    execute(body, x, maps=maps, shared=2056, options=options)


@IN_EVERY_ORDER
def test_what_tma_asks_of_addresses_and_strides(options):
    boxed(options, 128, 144)
    convicted("alignment", boxed, options, 16, 144)
    convicted("alignment", boxed, options, 128, 132)


@IN_EVERY_ORDER
def test_registers_and_shared_memory_that_no_multiprocessor_has(options):
    execute("setmaxnreg.inc.sync.aligned.u32 240;", threads=256, options=options)
    execute("mov.u32 %r1, %tid.x;", shared=227 << 10, options=options)
    for body, call in (
        ("setmaxnreg.inc.sync.aligned.u32 240;", {"threads": 1024}),
        ("setmaxnreg.inc.sync.aligned.u32 241;", {"threads": 128}),
        ("mov.u32 %r1, %tid.x;", {"shared": 400 << 10}),
    ):
        convicted("launch", lambda body=body, call=call: execute(body, **call, options=options))
