"""How a call of attention is cut for a GPU, what each kernel takes for it, and who serves it.

One model of times is the reason for who serves what. A kernel takes a while to begin and to end;
in between it takes the longer of what memory and what its busiest multiprocessor take. Where keys
were split, partial results go through L2 and a second launch combines them, or as in `csrc/cuda`
the last block. Its constants were fitted to an H100 (``tests/test_attention_plans.py`` holds them
against every cell that was measured). For other GPUs they are *predicted*: their data sheets' rates
and clocks in place of an H100's.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from . import gpu_record
from .gpu_record import Shape

COMBINED = 16  # states of 128 columns that the combine merges at once
FAN_IN = 8  # states that one block of `csrc/cuda` merges
ELEMENT = 2  # bytes: float32 and 8 bits are Triton's alone


class Gpu(NamedTuple):
    """What one multiprocessor has.

    ``groups``: warps multiply in groups, and a launch may begin before the one before it ended.
    """

    bandwidth: float  # bytes of memory in a microsecond
    clock: float  # cycles in a microsecond
    groups: bool


H100 = Gpu(3.07e6 / 132, 1700, True)  # measured
A100 = Gpu(1.8e6 / 108, 1410, False)
L40S = Gpu(0.78e6 / 142, 2500, False)
B200 = Gpu(7.2e6 / 148, 1850, True)


def gpu_of(arch: str) -> Gpu:
    """Return the GPU that stands for an architecture, as "sm_90a"."""
    number = int(re.sub(r"\D", "", arch))
    if number == 80:
        return A100
    if number == 90:
        return H100
    return B200 if 100 <= number < 120 else L40S


def is_unfenced(version: str) -> bool:
    """Return whether that Triton lets groups of warps multiply what is not fenced, as before 3.7.

    Its tiles of 16 bits have at most 32 rows then, which single warps multiply.
    """
    return bool(version) and tuple(map(int, version.split(".")[:2])) < (3, 7)


class Splits(NamedTuple):
    """How the keys of each request are cut; `_blocks.split_size_of` says how they are used."""

    wanted: int
    least: int
    most: int
    slots: int  # of the grid: the splits of a request that fills its cache


def splits(
    block_m: int,
    rows: int,
    resident: int,
    multiprocessors: int,
    programs: int,
    span: int,
    *,
    limit: int,
    alone: bool = False,
    least: int | None = None,
) -> Splits:
    """Return how Triton's and Gluon's requests are cut of which the longest may have ``span`` keys.

    A multiprocessor holds ``resident`` tiles of ``block_m`` of the ``rows``, there are ``programs``
    of them before any cut, and memory for ``limit`` slots. One wave of programs is wanted: more
    would leave a short last one. Float32 partials, written and read, are 8 bytes for each row and
    each of the D columns, where K and V are 4 per key: at ``least`` keys they cost up to half, in
    L2 (an SM without work costs more: of 4 rows, 64 keys instead of 256 took 0.12 ms off 32
    layers over 512 keys on an H100), at ``most`` 1/128 or less. Tiles of 64 rows begin
    with one program per SM, which is enough to keep 64 KiB in flight there, and come to more where
    their keys pay for it. Beyond one wave only those requests of a batch are spread that have twice
    ``most`` keys for each split: one ``alone`` would leave its last wave short.
    """
    places = resident * multiprocessors
    first = places if block_m < 64 else multiprocessors
    wanted, wave = (_wanted(x // programs) for x in (first, places))
    least = least or (64 if rows <= 16 else max(256, 4 * block_m))
    most = max(4096, 256 * block_m)
    count = min(wanted * max(1, span // (most * wanted)), -(-span // least))
    return Splits(wanted, least, most, max(1, min(count, wave if alone else limit, limit)))


def _wanted(programs: int) -> int:
    """Return how many splits make so many programs, or nearly.

    33 would take the combine a third step for 3% more programs.
    """
    over = programs % COMBINED
    return max(1, programs - over if over <= programs // COMBINED else programs)


def decode_splits(
    rows: int, resident: int, multiprocessors: int, heads: int, span: int, *, limit: int
) -> Splits:
    """Return how the requests of `csrc/cuda` are cut, whose blocks have 16, 32 or 64 ``rows``.

    Before any split there are `heads` blocks. One wave of blocks is wanted. At ``least`` keys
    float32 partial results cost up to a quarter of what K and V do, at ``most`` 1/64, which is
    cheap enough for long requests of a ragged batch to be spread over the GPU.
    """
    wanted = max(1, resident * multiprocessors // heads)
    least = max(256, 8 * rows)
    most = 16 * least
    slots = max(min(wanted, -(-span // least)), -(-span // most), 1)
    return Splits(wanted, least, most, min(slots, limit))


class Cut(NamedTuple):
    """A call as a kernel cuts it: rows of a tile, tiles that an SM holds, slots of the grid."""

    block_m: int
    resident: int
    slots: int


def cut_of(kernel: str, shape: Shape, kv_heads: int, multiprocessors: int, gpu: Gpu = H100) -> Cut:
    """Return how a kernel cuts a call, where memory for partial results is no limit."""
    heads, padded = kv_heads * shape.batch, max(16, 1 << (shape.rows - 1).bit_length())
    if kernel == "cuda":
        found = decode_splits(padded, 2, multiprocessors, heads, shape.context, limit=1 << 16)
        return Cut(padded, 2, found.slots)
    if kernel == "gluon":
        block_m, resident = (64, 2) if shape.rows <= 64 else (128, 1)
    else:
        old = is_unfenced(gpu_record.triton_version())
        block_m = min(padded, 32 if gpu.groups and old else 64)
        resident = 1 if block_m == 16 else 2
    found = splits(
        block_m, shape.rows, resident, multiprocessors, heads * -(-shape.rows // block_m),
        shape.context,
        limit=1 << 16, alone=shape.batch == 1,
    )  # fmt: skip
    return Cut(block_m, resident, found.slots)


def _is_listed(shape: Shape) -> bool:
    return shape.op == "sparse_gather_attention"


# Microseconds, but where said otherwise; of an H100.
BEGINS = {"triton": 8.0, "gluon": 5.9, "cuda": 7.0}  # to launch, to fill pipelines and to drain
LOOKS_UP = {"triton": 4.2, "gluon": 0.0, "cuda": 5.5}  # until indices have come
BESIDE = 0.97  # of the bandwidth that one program reads an SM's share at, by two at once
FILLED = 0.5  # of the bandwidth is had by few blocks
CUDA_BYTES = 11.6  # that a multiprocessor reads in a cycle by `csrc/cuda`
STEP = 0.65  # in which a block of `csrc/cuda` merges four rows on one of its levels
# Instructions that an SM issues in a cycle, where they wait for each other.
ISSUED = {"triton": 1.2, "cuda": 0.95}
# Counted, by Triton 3.9: instructions for a key of a tile by its rows, 128 columns.
INSTRUCTIONS = {
    "triton": {16: 20.4, 32: 30.6, 64: 33.4},
    "triton, before sm_90": {16: 20.4, 32: 30.8, 64: 73.5},
    "cuda": {16: 15.4, 32: 23.3, 64: 43.5},
}
# 64 keys of a tile of Gluon's: 64 rows, 128, and those 128 keys at a time.
TILE = {64: 0.55, 128: 0.82}
L2 = 5e6 / 132  # bytes that a multiprocessor exchanges with it
COMBINES = 2.3
COMBINE_PROGRAM = 0.0017  # each program of a combine, which is one warp
EARLY = 1.5  # what a combine saves that may begin early: FlashAttention 3's does; estimated


def microseconds(
    kernel: str,
    shape: Shape,
    kv_heads: int,
    multiprocessors: int,
    gpu: Gpu = H100,
    cut: Cut | None = None,
    *,
    early: bool | None = None,
    tile: float | None = None,
    most_rows: int = 4,
) -> float:
    """Return what a call in 16 bits takes by "triton", "gluon" or "cuda".

    Parameters
    ----------
    cut, early, tile, most_rows
        What is asked for in place of what is shipped: how the call is cut, whether its combine may
        begin early, the time of 64 keys of a tile of Gluon's, rows of a combine's program.
    """
    cut = cut or cut_of(kernel, shape, kv_heads, multiprocessors, gpu)
    tiles = -(-shape.rows // cut.block_m)
    blocks = kv_heads * shape.batch * tiles * cut.slots
    keys = shape.batch * kv_heads * shape.context
    row = ELEMENT * shape.head_dim
    began = BEGINS[kernel] + (LOOKS_UP[kernel] if _is_listed(shape) else 0.0)

    bandwidth = gpu.bandwidth * multiprocessors
    if kernel != "cuda" and cut.resident > 1 and blocks > multiprocessors:
        bandwidth *= BESIDE
    if kernel == "cuda":
        bandwidth = min(bandwidth, CUDA_BYTES * gpu.clock * multiprocessors)
    places = multiprocessors * (cut.resident if kernel == "cuda" else 1)
    memory = 2 * keys * row / bandwidth / min(1.0, blocks / places + FILLED)

    if kernel == "gluon":
        of_block = -(-shape.context // cut.slots // 64)
        time = (tile or TILE[cut.block_m]) * shape.head_dim / 128 * H100.clock / gpu.clock
        busy = -(-blocks // multiprocessors) * of_block * time
    else:
        kind = kernel
        if kernel == "triton" and not gpu.groups:
            kind = "triton, before sm_90"
        issued = INSTRUCTIONS[kind][cut.block_m] * shape.head_dim / 128
        busy = issued * keys * tiles / min(blocks, multiprocessors) / (ISSUED[kernel] * gpu.clock)
    time = began + max(memory, busy)
    if cut.slots == 1:
        return time
    states = shape.batch * kv_heads * shape.rows
    if kernel == "cuda":
        levels, left = 0, cut.slots
        while left > 1:
            left, levels = -(-left // FAN_IN), levels + 1
        return time + STEP * levels * -(-shape.rows // 4)
    rows = min(most_rows, max(1, COMBINED // (1 << (cut.slots - 1).bit_length())))
    partial = 2 * cut.slots * states * (4 * shape.head_dim + 4) / (L2 * multiprocessors)
    saved = EARLY if (gpu.groups if early is None else early) else 0.0
    return time + partial + COMBINES + COMBINE_PROGRAM * states / rows - saved


UNSURE = 0.1  # share that two predictions may differ by and mean nothing
GLUON_HEAD_DIMS = (64, 128)
GLUON_OPS = ("hybrid_tree_attention", "verify_attention")


def gluon_may_serve(shape: Shape, arch: str, *, collects: bool) -> bool:
    """Return whether Gluon's kernel is made for such calls.

    What few rows collect has no place beside a second block, and was not timed.
    """
    made = shape.op in GLUON_OPS and shape.head_dim in GLUON_HEAD_DIMS
    return arch.startswith("sm_90") and made and not (collects and shape.rows <= 16)


@functools.lru_cache(4096)
def fastest(
    shape: Shape, arch: str, multiprocessors: int, kv_heads: int, among: tuple[str, ...]
) -> str:
    """Return which of the kernels that can serve a call the model finds fastest.

    Where it only predicts, the first of them is left by a clear difference alone.
    """
    gpu = gpu_of(arch)
    times = [microseconds(kernel, shape, kv_heads, multiprocessors, gpu) for kernel in among]
    times[0] *= 1 if gpu is H100 else 1 - UNSURE
    return among[times.index(min(times))]


# Operations in a cycle of a multiprocessor that FlashAttention does of long prompts, causal, of 128
# columns: as published of 2, 3 and 4; for L40S the same share of its peak as on A100.
PROMPTS = {
    "flash-attn 2": {A100: 1310, L40S: 650, H100: 1650},
    "flash-attn 3": {H100: 2850},
    "flash-attn 4": {H100: 2850, B200: 5480},
}
_CHUNK = 2048  # tokens of a prompt, and keys before them


def prompts_by(
    arch: str, multiprocessors: int, heads: tuple[int, int], head_dim: int, among: tuple[str, ...]
) -> str | None:
    """Return which of `PROMPTS` is predicted to be clearly faster for prompts than our kernels.

    `heads` are those of queries and of keys. None: ours are.
    """
    gpu, (q_heads, kv_heads) = gpu_of(arch), heads
    rows = _CHUNK * q_heads // kv_heads
    shape = Shape("hybrid_tree_attention", "bf16", head_dim, rows, 2 * _CHUNK, 1)
    own = microseconds("triton", shape, kv_heads, multiprocessors, gpu)
    gluon = gluon_may_serve(shape, arch, collects=False) and gpu_record.has_passed("gluon", (9, 0))
    if gluon and not is_unfenced(gpu_record.triton_version()):
        own = min(own, microseconds("gluon", shape, kv_heads, multiprocessors, gpu))
    work = 4 * shape.rows * kv_heads * shape.head_dim * shape.context  # masked tiles are few
    known = {name: PROMPTS[name][gpu] for name in among if gpu in PROMPTS.get(name, {})}
    if not known:
        return None
    best = max(known, key=known.__getitem__)
    time = work / (known[best] * gpu.clock * multiprocessors)
    return best if time < (1 - UNSURE) * own else None


def served_by(
    gpu: str, shape: Shape, arch: str, multiprocessors: int, kv_heads: int, *, collects: bool
) -> str:
    """Return who is to serve a call that `csrc/cuda` can: "cuda", "gluon" or "triton".

    What was measured on a GPU of this name decides; the model where nothing near was.
    """
    if winner := gpu_record.winner(gpu, shape):
        return winner
    among: tuple[str, ...] = ("cuda", "triton")
    if gluon_may_serve(shape, arch, collects=collects) and gpu_record.has_passed("gluon", (9, 0)):
        among += ("gluon",)
    return fastest(shape, arch, multiprocessors, kv_heads, among)
