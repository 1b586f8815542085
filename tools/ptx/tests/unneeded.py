"""Barriers, fences and waits that no access depends on, each with the reason why.

`test_unneeded.py` removes every one of the CUDA and Gluon kernels that a case executes. What is
not caught then must be named here, so that nothing stays unexplained: (kind, text of its line or,
behind "< ", of the line that it is inlined into, why).
"""

import functools
from pathlib import Path

ROOT = Path(__file__).parents[3]
KINDS = {
    "barrier removed", "copy wait weakened", "product wait weakened", "register fence removed",
    "mbarrier wait removed", "arrival removed", "proxy fence removed", "fence removed",
    "order of an atomic dropped",
}  # fmt: skip

_ITSELF = "Gluon lets a barrier stand before what one thread does at an mbarrier; "
GLUON = (
    (
        "barrier removed",
        "< _wait(full, ",
        _ITSELF + "here every thread waits for the mbarrier itself and has touched nothing since",
    ),
    (
        "barrier removed",
        "mbarrier.arrive(empty.index(k % RING), count=1)",
        "K of tile i is given back before V of tile i - 1, behind whose products all warps meet; "
        "the producer waits for V's buffer before it waits for K's",
    ),
    (
        "barrier removed",
        "mbarrier.arrive(turns.index(1 - INDEX), count=1)",
        "turns say who multiplies first, for speed: no data pass from one group to the other",
    ),
    (
        "barrier removed",
        "mbarrier.expect(full.index(at",
        _ITSELF
        + "all of the producer's threads have waited for the buffer, one expects and copies",
    ),
    (
        "barrier removed",
        "load_tensor(",
        _ITSELF + "the same thread has expected the bytes before, in its own order",
    ),
    (
        "barrier removed",
        "async_copy.mbarrier_arrive(full.index(at))",
        "every thread's own copies count at the mbarrier when they are complete",
    ),
    (
        "barrier removed",
        "def hopper_kernel(",
        "the third partition's warps meet the others at the start and the end alone, where they "
        "read and write nothing that others do not read only",
    ),
    (
        "register fence removed",
        "warpgroup_mma(",
        "every product has a fence: of two in a row without a write between them the first does",
    ),
    (
        "mbarrier wait removed",
        "< _wait(full, ",
        "the second group takes its turn behind the first, which has waited for the same item; and "
        "copies of rows are complete in order, so that V has come where the next K has",
    ),
    (
        "proxy fence removed",
        "< _wait(full, ",
        "rows are copied in order and a fence covers all that was written before: V has come where "
        "the next K has, behind whose wait one stands",
    ),
    (
        "proxy fence removed",
        "< _load_queries(",
        "where no tile comes by TMA the wait for the first K has a fence too",
    ),
    (
        "proxy fence removed",
        "load_tensor(",
        "reads by ordinary instructions before a bulk write: the mbarrier orders these by itself",
    ),
)
CUDA = (
    (
        "barrier removed",
        "// the sums before have been read",
        "there are none before, or another barrier stands behind their reading",
    ),
    (
        "barrier removed",
        "// the rows' bounds are written",
        "of more than 16 rows queries are copied behind a barrier of their own",
    ),
    (
        "barrier removed",
        "__syncthreads();  // before the first log-sum-exp makes room for that of all",
        "of a merge that gives the result: nothing is written where states lie",
    ),
    (
        "barrier removed",
        "__syncwarp();  // the result may lie where a state did",
        "of a result elsewhere",
    ),
)


@functools.cache
def _lines(name):
    """Return the lines of a source file of the kernels."""
    for folder in ("triton_kernels", "csrc/cuda"):
        if (path := ROOT / folder / name).is_file():
            return path.read_text().splitlines()
    return []


def text_of(place):
    """Return the source line "file:line"; "" if there is none.

    Triton names the kernel's file for lines of the consumer that runs in its own warps too.
    """
    name, _, line = place.rpartition(":")
    names = [name, "_hopper_consume.py"] if name == "_hopper_kernel.py" else [name]
    found = [_lines(x)[int(line) - 1 : int(line)] for x in names if int(line)]
    return "\n".join(text for lines in found for text in lines)


def why(mutation):
    """Return why nothing depends on what a mutation removes, or None."""
    inner, *outer = (text_of(place) for place in mutation.source.split(" < "))
    for kind, text, reason in GLUON + CUDA:
        lines = outer if text.startswith("< ") else [inner]
        if kind == mutation.kind and any(text.removeprefix("< ") in line for line in lines):
            return reason
    return None
