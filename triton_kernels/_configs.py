"""Static launch configurations: how a problem is cut into tiles, per architecture.

Nothing is timed or tuned at run time: a call never stalls, and equal calls run equal code. The rows
were chosen by counting, from kernels compiled offline (``tests/triton_kernels/test_compile.py``
prints registers and shared memory), and timed on an H100: of some 60 others none was 5% faster.
"""

from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from .. import attention_plans, gpu_record
from ..attention_plans import COMBINED, Splits
from ._bfloat16 import INTERPRETED


class Tile(NamedTuple):
    """Keys per step, warps and pipeline depth."""

    block_n: int
    num_warps: int
    num_stages: int


class Widths(NamedTuple):
    """Columns of keys and values, as `_blocks.load_keys` loads them."""

    D: int
    block_d: int  # of keys, a power of two: all of them padded, or the first
    block_r: int  # the rest of them padded, or 0
    v_dim: int
    block_v: int  # of values padded; 0 where they are the first part of the keys


def widths_of(D, v_dim, v_in_k=False, *, in_registers=False) -> Widths:
    """Return how columns are cut; ``v_in_k`` says that values are what keys begin with.

    ``in_registers``: products hold whole rows of both operands there, of which 128 columns fit.
    """
    padded = max(16, triton.next_power_of_2(D))
    if v_dim == D <= (128 if in_registers else 256):
        return Widths(D, padded, 0, v_dim, padded)
    if v_dim == D <= 256:
        return Widths(D, 128, max(16, triton.next_power_of_2(D - 128)), v_dim, padded)
    rest = D - padded // 2
    if padded == D or padded == 16 or D <= 24:
        block_d, block_r = padded, 0
    else:
        block_d, block_r = padded // 2, max(16, triton.next_power_of_2(rest))
    block_v = 0 if v_in_k and v_dim == block_d else max(16, triton.next_power_of_2(v_dim))
    return Widths(D, block_d, block_r, v_dim, block_v)


class AttentionConfig(NamedTuple):
    """Rows and keys per tile, the rest of a `Tile`, compiler options.

    ``programs`` is how many of these share one SM; ``pairs`` says that `_pairs` attends.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    options: dict
    pairs: bool = False


# {kind: {BLOCK_M: Tile}}. Kinds: 16-bit and 32-bit elements, "wide" where K or V has up to 256
# columns, "latent" where it has more: 64 rows of these spill 256 bytes a thread of 8 warps, sm_90.
#
# BLOCK_M is the smallest that holds all g * T rows, at most 128: K and V are read once per tile.
# From 64 rows Hopper and Blackwell use their own tensor-core instructions (wgmma, tcgen05); below
# that it is mma.sync everywhere.
# BLOCK_N 64 with 3 stages keeps two K and two V tiles of 16 KiB in flight, 64 KiB per program: more
# than the 25 KiB per SM that 4.3 TB/s asks for at 700 ns. BLOCK_N 128 spills from 64 rows. Where
# D is 256 the tiles are twice as wide, so half as long.
# 4 warps may have 255 registers a thread and share an SM with one more program, 8 are alone on it.
# float32 has no tensor cores without TF32, and its operands sit in registers: the smallest tiles,
# not pipelined. It is here to be exact.
# What spills even so, in bytes per thread: the tree in a cache of 8 bits behind a window up to 8 on
# sm_90 and sm_100, on gfx942 172, and logits from 8 bits there 408; collecting in 16 bits up to 8
# on sm_80, 16 on sm_90 (of latents 24) and 24 on gfx942; lists per row in ragged rows of 64 heads
# where D is 128, over pages and with whole prefixes, 16 on sm_100. By Triton 3.6 64 rows where D is
# 64 or 256 up to 40 on sm_80, where D is 192 beside values of 128 16, and logits of latents 24;
# their logits up to 148 on gfx942.
FLOAT32 = {16: Tile(16, 8, 1)}
TABLE = {
    # 8 warps from 64 rows, because mma.sync keeps the accumulators of 4 warps above 255 registers.
    # All rows fit in 99 KiB, so that they serve 8.6, 8.9 and 12.0 too; D 256 gets less depth.
    "sm_80": {
        "16": {16: Tile(64, 4, 3), 32: Tile(64, 4, 3), 64: Tile(64, 8, 3)},
        "16_wide": {16: Tile(32, 4, 2), 32: Tile(32, 8, 2), 64: Tile(32, 8, 2)},
        "16_latent": {16: Tile(32, 8, 2), 32: Tile(32, 8, 2)},
        "32": FLOAT32,
        "32_wide": FLOAT32,
    },
    # 228 KiB of shared memory hold two programs of up to 113 KiB.
    "sm_90": {
        "16": {16: Tile(64, 4, 3), 32: Tile(64, 4, 3), 64: Tile(64, 4, 3), 128: Tile(64, 8, 3)},
        "16_wide": {16: Tile(32, 4, 3), 32: Tile(32, 8, 3), 64: Tile(32, 8, 3)},
        "16_latent": {16: Tile(32, 8, 3), 32: Tile(32, 8, 3)},
        "32": FLOAT32,
        "32_wide": FLOAT32,
    },
    "sm_100": {
        "16": {16: Tile(64, 4, 3), 32: Tile(64, 4, 3), 64: Tile(64, 4, 3), 128: Tile(64, 8, 3)},
        "16_wide": {16: Tile(32, 4, 3), 32: Tile(32, 8, 3), 64: Tile(32, 8, 3)},
        "16_latent": {16: Tile(32, 8, 3), 32: Tile(32, 8, 3)},
        "32": FLOAT32,
        "32_wide": FLOAT32,
    },
    # 64 KiB of LDS hold one K and one V tile, so two stages; there are 512 registers.
    "gfx942": {
        "16": {16: Tile(64, 4, 2), 32: Tile(64, 4, 2), 64: Tile(64, 4, 2)},
        "16_wide": {16: Tile(32, 4, 2), 32: Tile(32, 4, 2), 64: Tile(32, 4, 2)},
        "16_latent": {16: Tile(16, 4, 2)},
        "32": FLOAT32,
        "32_wide": {16: Tile(16, 4, 1)},
    },
}
# {BLOCK_M: keys per step} where `_pairs` attends. 32 rows with 128 keys spill 72 bytes on sm_90.
PAIRS = {16: 128, 32: 64}
# Before 3.7, Triton lets wgmma and tcgen05 read what cp.async has written without the fence between
# the two proxies (triton-lang/triton#9610; tools/ptx finds it). Below 64 rows it is mma.sync.
UNFENCED = attention_plans.is_unfenced(triton.__version__)
# What such a Triton miscompiles in larger tiles (`_miscompiled`): {D: the most rows, on sm_80}.
MISCOMPILED = {8: (16, 16), 24: (16, 16), 40: (128, 32)}
# And in tiles of more than 32 rows from 8 bits, where D is 16 or 32 and on sm_80 64; where D is 16
# and logits are collected, in tiles of 32 too.
MISCOMPILED_BELOW = {"sm_80": 72, "sm_90": 64}
# Left to itself, ptxas spills a few values here and there to reach a rounder register count.
OPTIONS = {arch: {"maxnreg": 255} for arch in ("sm_80", "sm_90", "sm_100")}
WORKSPACE = 64 << 20  # bytes that partial results may take
DRAFTED = 64  # rows of a request; longer chains are prompts, and have a kernel of their own
_forced: dict = {}


@contextmanager
def forced(**values):
    """Override, for the tests, ``arch``, a field of `AttentionConfig`, or what decides splits.

    That is ``multiprocessors``, ``workspace`` [bytes], and ``least`` and ``split_size`` [keys].
    """
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


def architecture(device: torch.device) -> str:
    """Return what a device's configurations are of."""
    return _forced.get("arch") or _architecture(device)


def multiprocessors(device: torch.device) -> int:
    """Return how many programs a device runs at once at least."""
    return _forced.get("multiprocessors") or _count_multiprocessors(device)


@lru_cache(None)
def _count_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def compiler_options(device) -> dict:
    """Return what every kernel of a device is compiled with."""
    return OPTIONS.get(architecture(device), {})


def attention_config(
    device, dtype, rows, widths, lookups, converts=False, logits=False, pairs=False
) -> AttentionConfig:
    """Return the configuration for ``rows`` query rows that share their keys, and `Widths`.

    These are the g * T rows of a KV head, or with lists per row g. ``lookups`` is how many tables,
    of pages or of indices, stand between a key's number and its address. Triton spends two pipeline
    stages on each before as many tiles are in flight as without; the LDS of gfx942 has room for one
    more stage in all. ``converts`` are kernels that read 8 bits, ``logits`` those that collect
    them: who does both with 4 warps spills 64 rows on sm_90.
    """
    compute = _attention_config.__wrapped__ if _forced else _attention_config
    return compute(device, dtype, rows, widths, lookups, converts, logits, pairs)


@lru_cache(None)
def _attention_config(
    device, dtype, rows, widths, lookups, converts, logits, pairs
) -> AttentionConfig:
    D, columns = widths.D, max(widths.block_d + widths.block_r, widths.block_v)
    form = "_latent" if columns > 256 else "_wide" if columns > 128 else ""
    kind = f"{8 * dtype.itemsize}{form}"
    arch = architecture(device)
    tiles = TABLE[arch][kind]
    # What 8 bits become is stored by registers, and those stores every Triton fences. 64 rows of
    # more columns would spill.
    stored = UNFENCED and arch == "sm_90" and converts and D >= 64 and columns <= 128
    most = 32 if UNFENCED and arch in ("sm_90", "sm_100") and not stored else 128
    if UNFENCED and dtype.itemsize == 2:
        most = min(most, MISCOMPILED.get(D, (128, 128))[arch == "sm_80"])
    if UNFENCED and converts and MISCOMPILED_BELOW.get(arch, 0) > D:
        most = min(most, 16 if D == 16 else 32)
    own_values = form == "_latent" and widths.block_v  # beside keys, so twice as many bytes
    if own_values and arch == "sm_80":
        most = 16  # 32 rows of converted bytes would take 107 KiB of shared memory
    block_m = max(16, min(triton.next_power_of_2(rows), most, max(tiles)))
    tile = tiles[block_m]
    num_stages = tile.num_stages
    if num_stages > 1:
        num_stages += min(lookups, 1) if arch == "gfx942" else 2 * lookups
    if arch == "sm_80" and (form == "_latent" or (block_m == 64 and columns > 128)):
        num_stages = min(num_stages, 4)  # a fifth would take 2 KiB more than 99
    num_warps = tile.num_warps
    if widths.block_d > D and block_m == 64 and arch != "gfx942":
        num_warps = 8  # the masks of a padded D do not fit in 255 registers beside accumulators
    if UNFENCED and block_m == 32:
        num_warps = 8  # such a Triton spills where 4 warps collect
    if converts and logits and block_m == 64 and arch == "sm_90":
        num_warps = 8
    options = OPTIONS.get(arch, {})
    # Where little is computed one program alone reads an SM's share as fast: on an H100 the second
    # costs 4 to 6% at 32k keys and more. Bytes that are converted need both.
    alone = arch == "gfx942" or (block_m == 16 and dtype.itemsize == 2 and not converts)
    programs = 1 if alone else 8 // num_warps
    block_n = 16 if own_values else tile.block_n
    if stored and block_m >= 64:
        block_n = 32  # with 64 keys at a time it miscompiles (`_miscompiled`)
    if arch == "sm_100" and block_m == 64 and lookups == 2:
        programs = 1  # two would take 64 bytes of shared memory more than there are
    whole = not widths.block_r and min(widths.block_d, widths.block_v) >= 32
    pairs = pairs and whole and kind == "16" and block_m in PAIRS and arch != "gfx942"
    if pairs:
        block_n = PAIRS[block_m]
    config = AttentionConfig(block_m, block_n, num_warps, num_stages, programs, options, pairs)
    return config._replace(**{k: v for k, v in _forced.items() if k in config._fields})


def stages(config, lookups, fewer) -> int:
    """Return the stages of a loop with ``fewer`` lookups than the config's, as deep otherwise."""
    if config.num_stages == 1:
        return 1
    return max(2, config.num_stages - 2 * (lookups - fewer))


def converts_e4m3(device) -> bool:
    """Return whether a GPU has an instruction that Triton uses for e4m3, as `_eight_bits` asks."""
    arch = architecture(device)
    return arch in ("sm_90", "sm_100") and not INTERPRETED.value


def starts_early(device) -> bool:
    """Return whether a launch may start before the ones before it have ended, where they let it.

    Graphs hold such launches from CUDA 12.3 on.
    """
    arch = architecture(device)
    if arch not in ("sm_90", "sm_100") or INTERPRETED.value:
        return False
    return device.type != "cuda" or _cuda_of_driver() >= 12030


@lru_cache(None)
def _cuda_of_driver() -> int:
    """Return up to which CUDA a GPU's driver serves, as 12030 for 12.3."""
    asked = getattr(torch._C, "_cuda_getDriverVersion", None)  # builds for CPUs have none
    return asked() if asked else 13000


class HopperConfig(NamedTuple):
    """A block of the Hopper kernel: rows, keys per tile, buffers of the ring, registers a thread.

    ``programs`` is how many of these one SM holds at once.
    """

    block_m: int
    block_n: int
    ring: int
    consumer_registers: int
    producer_registers: int
    programs: int
    options: dict


# {(BLOCK_M, D): HopperConfig}. Two blocks of 64 rows share an SM and hide each other's softmax; a
# block of 128 rows hides that of each half behind the other's products. An old Triton needs more
# registers to bring a window's ragged rows, a newer one to collect logits there.
HOPPER = {
    (64, 64): HopperConfig(64, 64, 12, 200, 56, 2, {"maxnreg": 128}),
    (64, 128): HopperConfig(
        64, 64, 6, *((192, 64) if UNFENCED else (200, 56)), 2, {"maxnreg": 128}
    ),
    (128, 64): HopperConfig(128, 64, 12, 216, 72, 1, {}),
    (128, 128): HopperConfig(128, 64, 8, 208, 88, 1, {}),
}
# Products with 128 keys at a time read 4 bytes of shared memory for 6 with 64, and need fewer other
# instructions. What spills, 24 to 80 bytes, lies outside the loops of products where nothing hides
# or collects keys (`tools.ptx.offline.spilled_in_products`).
# A ring holds three tiles at least: keys whose values are looked at wait for a buffer that is freed
# behind the wait for them.
HOPPER_PLAIN = {(128, 128): HopperConfig(128, 128, 6, 240, 24, 1, {})}
# Beside scores two blocks of 64 rows have no registers to look at values; one block has.
HOPPER_SCORES = {
    (64, 64): HopperConfig(64, 64, 12, 240, 120, 1, {"maxnreg": 168}),
    (64, 128): HopperConfig(64, 64, 12, 240, 120, 1, {"maxnreg": 168}),
}


@lru_cache(None)
def _hopper_has_passed() -> bool:
    return gpu_record.has_passed("gluon", (9, 0))


def hopper_config(q, shape, kv_heads, page_size, *, collect, plain) -> HopperConfig | None:
    """Return the configuration of the Hopper kernel for a call of a `gpu_record.Shape`.

    ``plain`` calls have no window, no softcap and collect nothing. None where it does not serve, is
    not the fastest, or has not passed ``specattn gpu-check``.
    """
    arch = _forced.get("arch") or _architecture(q.device)
    if INTERPRETED.value or arch != "sm_90" or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    hopper = _forced.get("hopper", "arch" in _forced)  # what is compiled for need not be here
    if not hopper and ("hopper" in _forced or not _hopper_has_passed()):
        return None
    if not attention_plans.gluon_may_serve(shape, arch, collects=collect != "none"):
        return None
    tile = _forced.get("block_m", 64 if shape.rows <= 64 else 128), shape.head_dim
    config = HOPPER.get(tile)
    if collect == "scores":
        config = HOPPER_SCORES.get(tile, config)
    if plain and tile in HOPPER_PLAIN and page_size % HOPPER_PLAIN[tile].block_n == 0:
        config = HOPPER_PLAIN[tile]
    fastest = attention_plans.fastest(
        shape, arch, multiprocessors(q.device), kv_heads, ("gluon", "triton")
    )
    return config if fastest == "gluon" else None


def splits(device, config, rows, programs, span, state_bytes, *, alone=False) -> Splits:
    """Return how requests are cut of which the longest may have ``span`` keys.

    ``rows`` share their keys, ``programs`` is how many there are before any cut, ``state_bytes``
    what one slot's partial results take; `attention_plans.splits` has the rest.
    """
    limit = max(1, _forced.get("workspace", WORKSPACE) // state_bytes)
    if size := _forced.get("split_size"):
        slots = min(triton.cdiv(span, size), limit)
        return Splits(1 << 16, size, max(4096, 256 * config.block_m), max(1, slots))
    return attention_plans.splits(
        config.block_m, rows, config.programs, multiprocessors(device), programs, span,
        limit=limit, alone=alone, least=_forced.get("least"),
    )  # fmt: skip


def combine_blocks(device, num_states, D, ragged=False) -> tuple[int, int, int, int]:
    """Return (rows, states, columns, warps) of one combine program.

    Up to 2048 float32 elements: 16 states of 128 columns or as many as there are, of up to four
    rows, are loaded at once, which hides their latency, by one warp, so that no reduction leaves
    it. One state is no reduction but a stream of rows, for four warps; more columns than 128 are
    other programs'. The interpreter pays per program, so it takes many rows.
    """
    block_d = min(128, max(16, triton.next_power_of_2(D)))
    block_i = min(triton.next_power_of_2(num_states), COMBINED * 128 // block_d)
    block_r = 64 if device.type == "cpu" else COMBINED * 128 // (block_i * block_d)
    if block_i > 1 and device.type != "cpu":
        most = 128 if ragged else 512  # who owns several ragged rows takes registers that spill
        return max(1, min(block_r, most // block_d)), block_i, block_d, 1
    return block_r, block_i, block_d, 1 if block_r <= 2 else 4


def importance_blocks(D) -> tuple[int, int, int]:
    """Return (keys, padded D, warps) of one importance program: 64 elements a thread.

    Its loop is not pipelined; several programs per SM keep loads in flight.
    """
    block_d = max(16, triton.next_power_of_2(D))
    return 8192 // block_d, block_d, 4


def importance_tiles(device, blocks) -> int:
    """Return how many of ``blocks`` tiles of keys one importance program scores.

    Each program reads the mean query, 1/16 of a tile's keys. Six programs per SM, whose loads are
    96 KiB, are kept; 8 tiles leave nothing to gain.
    """
    return max(1, min(8, blocks // (6 * multiprocessors(device))))


def runs_ptx(device) -> bool:
    """Return whether kernels may say in PTX what they compute."""
    return architecture(device) != "gfx942" and not INTERPRETED.value
