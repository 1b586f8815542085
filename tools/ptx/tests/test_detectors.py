"""Every detector on a small kernel that has the fault, and on one that does not."""

import numpy as np
import pytest

from ..faults import Fault
from ..machine import Options
from .snippets import execute, pointer

X = np.arange(64, dtype=np.uint32)
OUT = np.zeros(64, np.uint32)
STORE = pointer("%q1", 1, 4) + "st.global.b32 [%q1], %r1;"


def fault(kind, body, *arrays, **options):
    with pytest.raises(Fault) as caught:
        execute(body, *arrays, **options)
    assert caught.value.kind == kind, caught.value
    return caught.value


def load(offset=0, width="b32"):
    return f"{pointer('%q0', 0, 4)} ld.global.{width} %r1, [%q0+{offset}]; {STORE}"


def test_bounds_of_global_memory():
    execute(load(), X, OUT, threads=64)
    message = fault("bounds", load(4), X, OUT, threads=64).message
    assert "256 bytes into 0 of 256 bytes" in message
    assert "ld.global.b32" in message


def test_bounds_of_shared_memory():
    body = "mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; st.shared.b32 [%r2+{}], %r1;"
    execute(body.format(0), shared=128)
    fault("bounds", body.format(4), shared=128)


def test_alignment():
    fault("alignment", load(2), X, OUT)


def test_guarded_out_accesses_do_not_count():
    body = pointer("%q0", 0, 4) + "setp.lt.u32 %p1, %r79, 32; mov.b32 %r1, 7;"
    body += "@%p1 ld.global.b32 %r1, [%q0];" + STORE
    (_, out), _ = execute(body, X[:32], OUT, threads=64)
    np.testing.assert_array_equal(out, np.where(X < 32, X, 7))


def test_unwritten_registers():
    fault("undefined", STORE, X, OUT)
    fault("undefined", "setp.eq.b32 %p1, %r1, 0; @%p1 bra HERE; HERE:")
    fault("undefined", "add.s64 %q1, %q2, 4; ld.global.b32 %r1, [%q1];")
    # Computing with them is no fault until something depends on it.
    body = "mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, {}; add.s32 %r2, %r3, 1;"
    body += "selp.b32 %r1, 5, %r2, %p1;" + STORE
    execute(body.format(0), X, OUT)
    fault("undefined", body.format(1), X, OUT)


def test_masked_loads_whose_masked_lanes_are_dropped():
    body = pointer("%q0", 0, 4) + "setp.lt.u32 %p1, %r79, 32;"
    body += "@%p1 ld.global.b32 %r1, [%q0]; add.s32 %r1, %r1, 1;" + pointer("%q1", 1, 4)
    execute(body + "@%p1 st.global.b32 [%q1], %r1;", X, OUT, threads=64)
    fault("undefined", body + "st.global.b32 [%q1], %r1;", X, OUT, threads=64)


def test_unwritten_global_memory():
    fault("undefined", load(), X, OUT, undefined=(0,))
    execute(load(), X, OUT, undefined=(1,))


def test_bits_that_defined_bits_decide():
    body = pointer("%q0", 0, 4) + "ld.global.b32 %r1, [%q0]; and.b32 %r1, %r1, {};" + STORE
    execute(body.format(0), X, OUT, undefined=(0,))
    fault("undefined", body.format(1), X, OUT, undefined=(0,))


# Every thread writes its word and reads that of a thread of the other warp, or of its own.
EXCHANGE = """
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    st.shared.b32 [%r2], %r1;
    {between}
    xor.b32 %r2, %r2, {distance};
    ld.shared.b32 %r1, [%r2];
    {after}
    st.shared.b32 [%r2], %r1;
"""


@pytest.mark.parametrize("options", [Options(), Options(warps=0), Options(warps=1)], ids=str)
@pytest.mark.parametrize(
    ("distance", "between", "after", "race"),
    [
        (128, "bar.sync 0;", "bar.sync 0;", None),
        (128, "", "bar.sync 0;", "read"),
        (128, "bar.warp.sync -1;", "bar.sync 0;", "read"),
        (128, "bar.sync 0;", "", None),  # everyone writes what it alone has read
        (4, "bar.warp.sync -1;", "bar.warp.sync -1;", None),
        (4, "", "bar.warp.sync -1;", "read"),
    ],
)
def test_races_between_threads(options, distance, between, after, race):
    body = EXCHANGE.format(distance=distance, between=between, after=after)
    call = {"threads": 64, "shared": 256, "options": options}
    if race is None:
        execute(body, **call)
    else:
        assert race in fault("race", body, **call).message


def test_a_write_after_a_read_needs_a_barrier():
    body = """mov.u32 %r1, %tid.x; shl.b32 %r2, %r1, 2; st.shared.b32 [%r2], %r1;
    bar.sync 0;
    xor.b32 %r3, %r2, 128; ld.shared.b32 %r4, [%r3];
    {} add.s32 %r1, %r1, 1; st.shared.b32 [%r2], %r1;"""
    execute(body.format("bar.sync 0;"), threads=64, shared=256)
    assert "a read by warp" in fault("race", body.format(""), threads=64, shared=256).message


def test_two_warps_may_write_the_same_value_but_not_two():
    execute("mov.b32 %r1, 3; mov.b32 %r2, 0; st.shared.b32 [%r2], %r1;", threads=64, shared=4)
    body = "mov.u32 %r1, %tid.x; mov.b32 %r2, 0; st.shared.b32 [%r2], %r1;"
    fault("race", body, threads=64, shared=4)
    _, counts = execute(body, threads=32, shared=4)
    assert counts.overwritten == 31


COPY = pointer("%q0", 0, 4) + """
    shl.b32 %r2, %r79, 2;
    cp.async.ca.shared.global [%r2], [%q0], 4{size};
    cp.async.commit_group;
    {wait}
    {barrier}
    xor.b32 %r2, %r2, 128;
    ld.shared.b32 %r1, [%r2];
""" + STORE  # fmt: skip


@pytest.mark.parametrize("copies", ["issue", "wait"])
def test_copies_need_their_wait_and_a_barrier(copies):
    def body(wait="cp.async.wait_group 0;", barrier="bar.sync 0;", size=""):
        return COPY.format(wait=wait, barrier=barrier, size=size)

    call = {"threads": 64, "shared": 256, "options": Options(copies=copies)}
    (_, out), _ = execute(body(), X, OUT, **call)
    np.testing.assert_array_equal(out, X ^ 32)
    assert "under way" in fault("race", body("cp.async.wait_group 1;"), X, OUT, **call).message
    fault("race", body(barrier=""), X, OUT, **call)
    source_size = "setp.lt.u32 %p1, %r79, 32; selp.b32 %r9, 4, 0, %p1; shl"
    zero_filled = body(size=", %r9").replace("shl", source_size, 1)
    (_, out), _ = execute(zero_filled, X[:32], OUT, **call)
    np.testing.assert_array_equal(out, np.where(X < 32, 0, X ^ 32))
    fault("bounds", body(), X[:32], OUT, **call)


def test_uninitialised_shared_memory():
    fault("undefined", "mov.b32 %r2, 0; ld.shared.b32 %r1, [%r2];" + STORE, X, OUT, shared=4)


def test_a_barrier_that_not_all_threads_reach():
    body = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bra END; bar.sync 0; END:"
    assert "32 of 64 threads" in fault("barrier", body, threads=64).message
    execute(body.replace("bar.sync 0", "bar.sync 1, 32"), threads=64)
    fault("barrier", body.replace("32;", "16;"), threads=64)


def test_named_barriers_order_only_who_takes_part():
    """Warp 0 writes and arrives, warp 1 waits and reads."""
    body = """mov.u32 %r1, %tid.x; mov.b32 %r2, 0; setp.lt.u32 %p1, %r1, 32; @%p1 bra WRITER;
    bar.sync 1, 64; ld.shared.b32 %r3, [%r2]; bra END;
WRITER: mov.b32 %r3, 7; {} END:"""
    store, arrive = "st.shared.b32 [%r2], %r3;", "bar.arrive 1, 64;"
    execute(body.format(store + arrive), threads=64, shared=4)
    fault("race", body.format(arrive + store), threads=64, shared=4)


def test_collective_instructions_of_half_a_warp():
    body = "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16;"
    body += "@%p1 shfl.sync.idx.b32 %r2, %r1, 0, 31, {};"
    execute(body.format("0xffff"))
    fault("divergence", body.format("-1"))


def test_a_loop_without_end(monkeypatch):
    monkeypatch.setattr("tools.ptx.machine.MAX_STEPS", 1000)
    fault("deadlock", "HERE: bra HERE;")


def test_the_order_of_blocks_shows_in_a_result_that_depends_on_it():
    """Blocks take numbers from a counter; whoever comes first gets 0."""
    body = """ld.param.u64 %q0, [p0]; atom.global.add.u32 %r1, [%q0], 1;
    mov.u32 %r2, %ctaid.x; ld.param.u64 %q1, [p1]; mad.wide.u32 %q1, %r2, 4, %q1;
    st.global.b32 [%q1], %r1;"""
    counter, out = np.zeros(1, np.uint32), np.zeros(8, np.uint32)
    results = [
        execute(body, counter, out, grid=8, options=Options(blocks=seed, wave=1))[0][1]
        for seed in (None, 1)
    ]
    assert (results[0] != results[1]).any()


def test_a_counter_that_is_not_reset():
    """The last of four blocks to arrive sets the counter to zero again."""
    body = """ld.param.u64 %q0, [p0]; mov.u32 %r3, %tid.x; setp.ne.u32 %p2, %r3, 0; @%p2 bra END;
    atom.global.add.u32 %r1, [%q0], 1; setp.eq.u32 %p1, %r1, 3; mov.b32 %r2, 0;
    {} END:"""
    call = {"grid": 4, "counters": (0,)}
    execute(body.format("@%p1 st.global.b32 [%q0], %r2;"), np.zeros(1, np.uint32), **call)
    fault("counter", body.format(""), np.zeros(1, np.uint32), **call)


def test_counts():
    body = load() + "shl.b32 %r2, %r79, {}; st.shared.b32 [%r2], %r1; bar.sync 0;"
    _, counts = execute(body.format(2), X, OUT, threads=64, shared=8192)
    assert (counts.bytes_read, counts.bytes_written) == (256, 256)
    assert (counts.sectors_read, counts.sectors_written) == (8, 8)
    assert (counts.shared_requests, counts.shared_conflicts, counts.barriers) == (2, 0, 1)
    assert counts.instructions["global"] == 4
    assert counts.instructions["synchronisation"] == 2
    _, counts = execute(body.format(7), X, OUT, threads=64, shared=8192)
    assert counts.shared_conflicts == 2 * 31
    (_, _), counts = execute(load().replace("4, %q0", "32, %q0", 1), X.repeat(8), OUT)
    assert counts.sectors_read == 32


def named_barriers(number):
    """Each pair of warps exchanges values through shared memory behind a barrier of its own."""
    return f"""
    mov.u32 %r0, %tid.x;
    shr.u32 %r1, %r0, 6;
    add.u32 %r1, %r1, 1;
    mov.u32 %r2, smem;
    mad.lo.u32 %r3, %r0, 4, %r2;
    st.shared.b32 [%r3], %r0;
    bar.sync {number}, 64;
    xor.b32 %r4, %r0, 32;
    mad.lo.u32 %r5, %r4, 4, %r2;
    ld.shared.b32 %r6, [%r5];
    {pointer("%q0", 0, 4)}
    st.global.b32 [%q0], %r6;"""


def test_warps_name_different_barriers_in_one_instruction():
    empty = np.zeros(128, np.uint32)
    (result,), _ = execute(named_barriers("%r1"), empty, threads=128, shared=512)
    np.testing.assert_array_equal(result, np.arange(128) ^ 32)


def test_more_threads_than_a_barrier_is_for():
    with pytest.raises(Fault, match="more than 64 threads at barrier 1"):
        execute(named_barriers("1"), np.zeros(128, np.uint32), threads=128, shared=512)
