"""Static launch configurations: how a problem is cut into tiles, per architecture.

Nothing is timed or tuned at run time: a call never stalls, and equal calls run equal code. The rows
were chosen by counting, from kernels compiled offline (``tests/triton_kernels/test_compile.py``
prints registers and shared memory); none has been timed on a GPU yet.
"""

from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
import triton


class Tile(NamedTuple):
    """Keys per step, warps, pipeline depth, and how many programs one SM holds at once."""

    block_n: int
    num_warps: int
    num_stages: int
    programs: int


class AttentionConfig(NamedTuple):
    """Rows and keys per tile, padded head dimension, the rest of a `Tile`, compiler options."""

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int
    programs: int
    options: dict


# {kind: {BLOCK_M: Tile}}. Kinds: 16-bit and 32-bit elements, "wide" where D is padded to 256.
#
# BLOCK_M is the smallest that holds all g * T rows, at most 64: a larger tile starves decoding of
# programs, and 128 rows would leave one program per SM. From 64 rows Hopper and Blackwell use
# their own tensor-core instructions (wgmma, tcgen05); below that it is mma.sync everywhere.
# BLOCK_N 64 with 3 stages keeps two K and two V tiles of 16 KiB in flight, 64 KiB per program: more
# than the 25 KiB per SM that 4.3 TB/s asks for at 700 ns. BLOCK_N 128 spills from 64 rows. Where
# D is 256 the tiles are twice as wide, so half as long.
# float32 has no tensor cores without TF32, and its operands sit in registers: the smallest tiles,
# not pipelined. It is here to be exact; collecting where D is 256 spills up to 368 bytes even so.
FLOAT32 = {16: Tile(16, 8, 1, 2)}
FLOAT32_WIDE = {16: Tile(16, 8, 1, 1)}
TABLE = {
    # 8 warps from 64 rows, because mma.sync keeps the accumulators of 4 warps above 255 registers.
    # All rows fit in 99 KiB, so that they serve 8.6, 8.9 and 12.0 too; D 256 gets less depth.
    "sm_80": {
        "16": {16: Tile(64, 4, 3, 2), 32: Tile(64, 4, 3, 2), 64: Tile(64, 8, 3, 1)},
        "16_wide": {16: Tile(32, 4, 2, 2), 32: Tile(32, 8, 2, 1), 64: Tile(32, 8, 2, 1)},
        "32": FLOAT32,
        "32_wide": FLOAT32_WIDE,
    },
    # 228 KiB of shared memory hold three programs of 72 KiB, or two of 64 rows. Where lookups or
    # collecting take more than 168 registers, 16 rows too are two programs per SM.
    "sm_90": {
        "16": {16: Tile(64, 4, 3, 3), 32: Tile(64, 4, 3, 2), 64: Tile(64, 4, 3, 2)},
        "16_wide": {16: Tile(32, 4, 3, 3), 32: Tile(32, 8, 3, 1), 64: Tile(32, 8, 3, 1)},
        "32": FLOAT32,
        "32_wide": FLOAT32_WIDE,
    },
    "sm_100": {
        "16": {16: Tile(64, 4, 3, 3), 32: Tile(64, 4, 3, 2), 64: Tile(64, 4, 3, 2)},
        "16_wide": {16: Tile(32, 4, 3, 3), 32: Tile(32, 8, 3, 1), 64: Tile(32, 8, 3, 1)},
        "32": FLOAT32,
        "32_wide": FLOAT32_WIDE,
    },
    # 64 KiB of LDS hold one K and one V tile per program, so two stages; there are 512 registers.
    "gfx942": {
        "16": {16: Tile(64, 4, 2, 2), 32: Tile(64, 4, 2, 1), 64: Tile(64, 4, 2, 1)},
        "16_wide": {16: Tile(32, 4, 2, 1), 32: Tile(32, 4, 2, 1), 64: Tile(32, 4, 2, 1)},
        "32": FLOAT32,
        "32_wide": FLOAT32_WIDE,
    },
}
# Before 3.7, Triton lets wgmma and tcgen05 read what cp.async has written without the fence between
# the two proxies (triton-lang/triton#9610; tests/ptx finds it). Below 64 rows it is mma.sync.
UNFENCED = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
# Left to itself, ptxas spills a few values here and there to reach a rounder register count.
OPTIONS = {arch: {"maxnreg": 255} for arch in ("sm_80", "sm_90", "sm_100")}
_forced: dict = {}


@contextmanager
def forced(**values):
    """Override ``arch``, ``split_size`` or fields of `AttentionConfig` for the tests."""
    previous = dict(_forced)
    _forced.update(values)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(previous)


@lru_cache(None)
def _architecture(device: torch.device) -> str:
    if torch.version.hip:
        return "gfx942"
    if device.type != "cuda":
        return "sm_90"  # the interpreter takes any
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


@lru_cache(None)
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def compiler_options(device) -> dict:
    """Return what every kernel of a device is compiled with."""
    return OPTIONS.get(_forced.get("arch") or _architecture(device), {})


def attention_config(device, dtype, rows, D, lookups) -> AttentionConfig:
    """Return the configuration for ``rows`` = g * T query rows per KV head.

    ``lookups`` is how many tables, of pages or of indices, stand between a key's number and its
    address. Triton spends two pipeline stages on each before as many tiles are in flight as
    without; the LDS of gfx942 has room for one more stage in all.
    """
    compute = _attention_config.__wrapped__ if _forced else _attention_config
    return compute(device, dtype, rows, D, lookups)


@lru_cache(None)
def _attention_config(device, dtype, rows, D, lookups) -> AttentionConfig:
    block_d = max(16, triton.next_power_of_2(D))
    kind = f"{8 * dtype.itemsize}{'_wide' if block_d > 128 else ''}"
    arch = _forced.get("arch") or _architecture(device)
    tiles = TABLE[arch][kind]
    most = 32 if UNFENCED and arch in ("sm_90", "sm_100") else 64
    block_m = max(16, min(triton.next_power_of_2(rows), most, max(tiles)))
    tile = tiles[block_m]
    num_stages = tile.num_stages
    if num_stages > 1:
        num_stages += min(lookups, 1) if arch == "gfx942" else 2 * lookups
    num_warps = tile.num_warps
    if block_d > D and block_m == 64 and arch != "gfx942":
        num_warps = 8  # the masks of a padded D do not fit in 255 registers beside accumulators
    options = OPTIONS.get(arch, {})
    config = AttentionConfig(
        block_m, tile.block_n, block_d, num_warps, num_stages, tile.programs, options
    )
    return config._replace(**{k: v for k, v in _forced.items() if k in config._fields})


def split_size(device, config, programs, span) -> int:
    """Return how many of a prefix's ``span`` keys one program takes.

    Only capacity and static shape decide, never a length, so that a captured graph stays right and
    a request's bits do not depend on its neighbours. Enough splits for two waves of programs; not
    below 256 keys, where the float32 partials of 64 rows would cost a quarter of what K and V do,
    nor above 8192, so that ragged batches end together. Powers of two: few different values.
    """
    if "split_size" in _forced:
        return _forced["split_size"]
    wanted = max(1, 2 * config.programs * _multiprocessors(device) // programs)
    return min(max(256, triton.next_power_of_2(triton.cdiv(span, wanted))), 8192)


def combine_blocks(device, num_states, D) -> tuple[int, int, int, int]:
    """Return (rows, states, padded D, warps) of one combine program.

    2048 float32 elements: up to 16 states of 128 are loaded at once, which hides their latency, by
    one warp, so that no reduction leaves it. Few states are no reduction but a stream of rows, for
    four warps; two count as four, which saves a variant. The interpreter pays per program, so it
    takes many rows.
    """
    block_d = max(16, triton.next_power_of_2(D))
    wanted = 1 if num_states == 1 else max(triton.next_power_of_2(num_states), 4)
    block_i = min(wanted, 2048 // block_d)
    block_r = 64 if device.type == "cpu" else 2048 // (block_i * block_d)
    return block_r, block_i, block_d, 1 if block_r <= 2 else 4


def importance_blocks(D) -> tuple[int, int, int]:
    """Return (keys, padded D, warps) of one importance program: 64 elements a thread.

    It has no loop to pipeline; several programs per SM keep loads in flight.
    """
    block_d = max(16, triton.next_power_of_2(D))
    return 8192 // block_d, block_d, 4


def write_blocks(D) -> tuple[int, int, int]:
    """Return (rows, padded D, warps) of one program that writes a cache.

    Eight elements a thread, 16 bytes of each of K and V: there is nothing to reuse.
    """
    block_d = max(16, triton.next_power_of_2(D))
    return max(1, 1024 // block_d), block_d, 4
