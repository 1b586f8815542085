"""Barriers, fences and waits that no access depends on, each with the reason why.

`test_unneeded.py` removes every one of the CUDA and Gluon kernels that a case executes. What is
not caught then must be named here, and nothing else: (kind, text of its line and, behind "< ", of
the line that it is inlined into, where, why). Where not all of these are meant, it says which ones:
for each target their numbers among its mutants of that kind and text, in the order of the kernel.
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
_MERGED_ONCE = (
    "cuda hybrid", "cuda hybrid 64 rows", "cuda hybrid paged", "cuda gather",
    "cuda scores 64 rows", "cuda window",
)  # fmt: skip
REASONS = (
    (
        "barrier removed",
        "< _wait(full, ",
        None,
        _ITSELF + "here every thread waits for the mbarrier itself and has touched nothing since",
    ),
    (
        "barrier removed",
        "mbarrier.arrive(empty.index(k % RING), count=1)",
        None,
        "K of tile i is given back before V of tile i - 1, behind whose products all warps meet; "
        "the producer waits for V's buffer before it waits for K's",
    ),
    (
        "barrier removed",
        "mbarrier.arrive(turns.index(1 - INDEX), count=1)",
        None,
        "turns say who multiplies first, for speed: no data pass from one group to the other",
    ),
    (
        "barrier removed",
        "mbarrier.expect(full.index(at",
        None,
        _ITSELF
        + "all of the producer's threads have waited for the buffer, one expects and copies",
    ),
    (
        "barrier removed",
        "load_tensor(",
        None,
        _ITSELF + "the same thread has expected the bytes before, in its own order",
    ),
    (
        "barrier removed",
        "async_copy.mbarrier_arrive(full.index(at))",
        None,
        "every thread's own copies count at the mbarrier when they are complete",
    ),
    (
        "mbarrier wait removed",
        "< _wait(full, ",
        {"hopper rows": (5, 6, 7), "hopper 128 rows": (5, 6, 7), "hopper scores": (2,)},
        "the second group takes its turn behind the first, which has waited for the same item",
    ),
    (
        "mbarrier wait removed",
        "< _wait(full, v, ",
        {"hopper rows": (0,), "hopper paged": (0,)},
        "rows are copied in order: V has come where the next K has",
    ),
    (
        "proxy fence removed",
        "< _wait(full, ",
        {"hopper rows": (5, 6, 7), "hopper 128 rows": (5, 6, 7), "hopper scores": (1, 2, 3)},
        "the second group takes its turn behind the first, which has fenced the same item",
    ),
    (
        "proxy fence removed",
        "< _wait(full, v, ",
        {
            "hopper": (0,),
            "hopper rows": (0,),
            "hopper paged": (0,),
            "hopper 128 rows": (0,),
            "hopper scores": (2,),
        },
        "rows are copied in order and a fence covers all that was written before: V has come where "
        "the next K has, behind whose wait one stands",
    ),
    (
        "proxy fence removed",
        "< _load_queries(",
        {"hopper rows": (0, 1), "hopper paged": (0,)},
        "where no tile comes by TMA the wait for the first K has a fence too",
    ),
    (
        "proxy fence removed",
        "load_tensor(",
        None,
        "reads by ordinary instructions before a bulk write: the mbarrier orders these by itself",
    ),
    (
        "barrier removed",
        "the sums before have been read < block_sum(own, sums, &total)",
        None,
        "no sums have been read before, or the end of the digit before stands behind their reading",
    ),
    (
        "barrier removed",
        "the sums before have been read < block_sum(above, sums, &above)",
        None,
        "no sums have been read before",
    ),
    (
        "barrier removed",
        "// the rows' bounds are written",
        {"cuda scores 64 rows": (0,)},
        "of more than 16 rows queries are copied behind a barrier of their own",
    ),
    (
        "barrier removed",
        "__syncthreads();  // before the first log-sum-exp makes room for that of all",
        dict.fromkeys(_MERGED_ONCE, (0,)),
        "of a merge that gives the result: nothing is written where states lie",
    ),
    (
        "barrier removed",
        "__syncwarp();  // the result may lie where a state did",
        None,
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


def explained(target, mutations):
    """Return {mutant: why nothing depends on what it removes} of a target's, in their order."""
    reasons = {}
    for kind, text, where, reason in REASONS:
        meant = [str(x) for x in mutations if x.kind == kind and _stands_in(text, x.source)]
        if where is not None:
            meant = [meant[number] for number in where.get(target, ())]
        reasons |= dict.fromkeys(meant, reason)
    return reasons


def _stands_in(text, source):
    inner, _, outer = text.partition("< ")
    line, *around = (text_of(place) for place in source.split(" < "))
    return inner.strip() in line and (not outer or any(outer in other for other in around))
