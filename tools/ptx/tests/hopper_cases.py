"""Calls that the Hopper kernel serves, at random."""

import random
from dataclasses import replace

from specattn.triton_kernels._configs import UNFENCED

from ..faults import Fault
from .case import Case
from .cases import HOPPER
from .checks import SCHEDULES, check, run


def drawn(seed):
    """Return a random case of 1 to 200 packed rows."""
    choose = random.Random(seed)
    op = choose.choice(("hybrid", "hybrid", "logits", "scores", "ragged hybrid", "ragged scores"))
    ragged, group = op.startswith("ragged"), choose.choice((1, 2, 3, 4, 5, 7, 8))
    rows = choose.randint(1, choose.choice((16, 64, 128, 200)) // group)
    lengths = tuple(
        choose.choice((0, choose.randint(1, 70), choose.randint(71, 350)))
        for _ in range(choose.randint(1, 3))
    )
    return Case(
        op,
        dtype=choose.choice(("bf16", "fp16")),
        rows=rows,
        head_dim=choose.choice((64, 64, 128)),
        lengths=lengths,
        group=group,
        kv_heads=choose.choice((1, 1, 2)),
        paged=choose.random() < 0.5,
        page_size=16 if ragged else choose.choice((16, 64, 128)),
        tree=choose.choice(("random", "chain", "in_cache")),
        window=choose.choice((None, None, 1, 20, 100, 300)),
        softcap=choose.choice((0.0, 0.0, 2.0)),
        sinks=op == "hybrid" and choose.random() < 0.4,
        per_head=op != "scores" or choose.random() < 0.7,
        split_size=choose.choice((64, 128, 256, None)),
        spare=choose.choice((3, 200)),
        hopper=True,
        ragged=(rows, *(choose.choice((0, 1, choose.randint(1, rows))) for _ in lengths[1:]))
        if ragged
        else None,
    )


# One mistake each in the kernel's instructions: (which ones, what becomes of one, the quick case,
# and if not all of them are meant: the file they stand in, which one there).
ONE, TWO = HOPPER[:2]
PLANTED = {
    "empty counts one group of two": ("mbarrier.init", ("2", "1"), TWO),
    "parity 0 only": ("mbarrier.try_wait", 2, ONE),
    "half the bytes of a copy": ("mbarrier.arrive.expect_tx", 2, ONE),
    "the producer does not wait for values": ("mbarrier.try_wait", None, ONE, "_hopper_produce", 1),
    "no proxy fence": ("fence.proxy.async", None, ONE),
    "values released early": ("wgmma.wait_group", None, ONE),
}


def planted(name):
    """Return what is said of the kernel with one mistake in it."""
    start, what, case, *place = PLANTED[name]

    def those_meant(kernel):
        meant = [i.index for i in kernel.instructions if i.name.startswith(start)]
        if place:
            file, number = place
            meant = [at for at in meant if kernel.instructions[at].source.startswith(file)]
            meant = [meant[number], meant[number] + 1]  # and the jump back to it
        return meant

    def broken(i):
        operands = list(i.operands)
        if what is None:
            return replace(i, guard=None, name="nop", operands=())
        if isinstance(what, tuple):
            operands = [what[1] if x == what[0] else x for x in operands]
        elif operands[what].isdigit():
            operands[what] = str(int(operands[what]) // 2)
        else:
            operands[what] = "0"
        return replace(i, operands=tuple(operands))

    def change(kernel):
        if kernel.name != "hopper_kernel":
            return kernel
        meant = those_meant(kernel)
        changed = [broken(i) if i.index in meant else i for i in kernel.instructions]
        if changed == kernel.instructions:
            raise ValueError(f"the kernel has no {start}")
        return replace(kernel, instructions=changed)

    try:
        run(case, "sm_90", change=change)
    except Fault as fault:
        return fault.kind
    except AssertionError:
        return "result"
    return "nothing"


def is_left(case):
    """Whether a case is left to the other kernel: what few rows collect, and some scores.

    These are scores of more than 64 rows with a Triton before 3.7; with a softcap they are means of
    logits, which ragged requests leave.
    """
    rows = case.rows * case.group
    many = (case.block_m or rows) > 64
    if case.op == "ragged scores" and case.softcap:
        return True
    if rows <= 16 and case.op != "hybrid" and case.op != "ragged hybrid":
        return True
    return UNFENCED and many and case.op.endswith("scores") and not case.softcap


def check_drawn(seed, schedules=SCHEDULES):
    """Execute a random case, in two orders unless told; it must be the Hopper kernel's."""
    case = drawn(seed)
    kernels = {name for name, _ in check(case, "sm_90", schedules)}
    served = "split_kv_kernel" if is_left(case) else "hopper_kernel"
    assert served in kernels, f"{case} was served by {kernels}"
    return str(case)
