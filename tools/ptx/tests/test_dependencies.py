"""Launches that start early: what they may do before they wait for the launches before them."""

import numpy as np
import pytest

from ..faults import Fault
from .snippets import execute

# A thread reads one of the first array's numbers and one of the second's, and adds them there.
BODY = """
    ld.param.u64 %q0, [p0]; ld.param.u64 %q1, [p1]; mov.u32 %r1, %tid.x;
    mad.wide.u32 %q2, %r1, 4, %q0; mad.wide.u32 %q3, %r1, 4, %q1;
    griddepcontrol.launch_dependents;
    {before}
    griddepcontrol.wait;
    {behind}"""
WEIGHT, ROW = "ld.global.b32 %r2, [%q2];", "ld.global.b32 %r3, [%q3];"
COPY = "mov.u32 %r9, smem; cp.async.ca.shared.global [%r9], [%q3], 4; cp.async.wait_all;"
BULK = """mov.u32 %r9, smem; setp.eq.u32 %p1, %r1, 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r9], 256;"""
SUM = "add.u32 %r4, %r2, %r3; st.global.b32 [%q3], %r4;"


def run(before, behind, constants=(0,)):
    arrays = np.arange(64, dtype=np.uint32), np.full(64, 5, np.uint32)
    body = BODY.format(before=before, behind=behind)
    (_, out), _ = execute(body, *arrays, threads=64, shared=256, constants=constants)
    return out


def test_constants_may_be_read_before_the_wait():
    assert (run(WEIGHT, ROW + SUM) == np.arange(64) + 5).all()


@pytest.mark.parametrize(
    ("before", "behind", "constants"),
    [
        (WEIGHT + ROW, SUM, (0,)),  # what others may write
        (WEIGHT, ROW + SUM, ()),  # what nobody calls a constant
        (WEIGHT, ROW + SUM, (1,)),
        ("st.global.b32 [%q3], %r1;", "", (0,)),  # what others may read
        ("st.global.b32 [%q2], %r1;", "", (0,)),  # a constant
        ("atom.global.add.u32 %r2, [%q3], 1;", "", (0,)),
        ("setp.lt.u32 %p1, %r1, 63; @%p1 bra AGAIN;" + ROW + "AGAIN:", WEIGHT, (0,)),  # one thread
        (COPY, "", (0,)),
        (BULK, "", (0,)),
    ],
)
def test_nothing_else_may_happen_before_the_wait(before, behind, constants):
    with pytest.raises(Fault, match=r"before griddepcontrol\.wait") as caught:
        run(before, behind, constants)
    assert caught.value.kind == "dependency"


def test_a_launch_that_does_not_start_early_waits_for_nothing():
    body = BODY.replace("griddepcontrol.wait;", "")
    arrays = np.arange(64, dtype=np.uint32), np.full(64, 5, np.uint32)
    (_, out), _ = execute(body.format(before=WEIGHT + ROW, behind=SUM), *arrays, threads=64)
    assert (out == np.arange(64) + 5).all()


def test_a_launch_that_starts_early_must_wait():
    body = BODY.replace("griddepcontrol.wait;", "")
    arrays = np.arange(64, dtype=np.uint32), np.full(64, 5, np.uint32)
    with pytest.raises(Fault, match=r"before griddepcontrol\.wait"):
        execute(body.format(before=WEIGHT + ROW, behind=SUM), *arrays, threads=64, early=True)
