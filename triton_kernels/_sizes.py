"""How the kernels beside attention cut their problems into programs, and for how many warps.

As in `_configs` nothing is timed at run time; the figures were chosen in the same way.
"""

from typing import NamedTuple

import triton

from . import _configs
from ._bfloat16 import INTERPRETED


def write_blocks(D) -> tuple[int, int, int]:
    """Return (rows, padded D, warps) of one program that writes a cache.

    Eight elements a thread, 16 bytes of each of K and V: there is nothing to reuse.
    """
    block_d = max(16, triton.next_power_of_2(D))
    return max(1, 1024 // block_d), block_d, 4


def rotate_blocks(D, heads) -> tuple[int, int]:
    """Return (heads, warps) of one program of `rotate_heads`, of at most ``heads`` of a row.

    16 elements a thread; reductions stay within one warp.
    """
    return min(max(1, 512 // triton.next_power_of_2(D)), triton.next_power_of_2(heads)), 1


def norm_blocks(width) -> tuple[int, int]:
    """Return (padded width, warps) of one program that norms a row: 16 elements a thread, or more.

    A row's sum of squares is made in an order that the width alone decides.
    """
    block = triton.next_power_of_2(width)
    return block, min(16, max(1, block // 512))


def gate_blocks() -> tuple[int, int]:
    """Return (columns, warps) of one program of `gate`: 8 elements a thread."""
    return 1024, 4


def part_blocks() -> tuple[int, int]:
    """Return (tokens, warps) of one program of `children`: a vocabulary's parts.

    32 logits a thread of one warp, so that finding the greatest again and again needs no barrier.
    """
    return 1024, 1


def rank_block(width) -> int:
    """Return to how many the best ones are padded: few kernels serve trees of all sizes."""
    return max(16, triton.next_power_of_2(width))


def choice_blocks(candidates) -> tuple[int, int]:
    """Return (padded candidates, warps) of one program that chooses: 32 a thread, or fewer."""
    block = max(256, triton.next_power_of_2(candidates))
    return block, min(16, max(1, block // 1024))


def state_blocks(device, states, rows, v_dim) -> tuple[int, int, int, int]:
    """Return (rows, key channels, value columns, warps) of one program of `gated_delta_tree`.

    Products of float32 keep both operands in registers, so key channels are few at a time. Every
    block of a head's columns reads keys and queries once more, so it is a whole head of 128 if as
    many ``states`` fill the GPU, and half of one otherwise; of 64 rows, more than a quarter spills,
    and on gfx942 more than half of any.
    """
    block_t = max(16, triton.next_power_of_2(rows))
    arch = _configs.architecture(device)
    widest = 128 if states >= _configs.multiprocessors(device) and arch != "gfx942" else 64
    block_v = min(widest if block_t <= 32 else 32, max(16, triton.next_power_of_2(v_dim)))
    # 16 rows of a whole head take 187 registers of 4 warps on sm_90; on sm_80 they spill.
    many = block_t > 32 or block_t * block_v > 2048 or arch == "sm_80" and block_v > 64
    return block_t, 16, block_v, 8 if many else 4


def commit_blocks(k_dim, v_dim) -> tuple[int, int, int]:
    """Return (key channels, value columns, warps) of one program of `gated_delta_commit`.

    All key channels and 8192 elements of a state at most: 64 a thread.
    """
    block_k = triton.next_power_of_2(k_dim)
    block_v = min(8192 // block_k, triton.next_power_of_2(v_dim))
    return block_k, block_v, max(1, min(4, block_k * block_v // 1024))


def conv_blocks(inputs) -> tuple[int, int, int]:
    """Return (inputs, channels, warps) of one program of `causal_conv_tree`.

    16 KiB of inputs, which every tap gathers from shared memory: 32 elements a thread, half as many
    where 128 rows would spill.
    """
    block_i = triton.next_power_of_2(inputs)
    return block_i, 4096 // block_i, 8 if block_i > 64 else 4


def conv_commit_block() -> tuple[int, int]:
    """Return (channels, warps) of one program of `causal_conv_commit`."""
    return 256, 4


class LinearBlocks(NamedTuple):
    """Rows, outputs and depth of a tile of `linear_few_rows`, and how it is compiled."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    precision: str  # of products, as `tl.dot` takes it
    options: dict


def linear_blocks(device, dtype, rows, outputs, depth, gated) -> LinearBlocks:
    """Return how one program of `linear_few_rows` multiplies ``rows`` [.., depth].

    It has 32 outputs, or 16 where an SM would have few programs: up to 16 rows, which cost little
    to be read twice as often, below two of an H100's (an 8B step took 5.86 ms instead of 5.97),
    else below one. Depth times stages is what is in flight. What is summed by itself in float32, a
    block, depends on the depth alone.
    """
    arch = _configs.architecture(device)
    block_n, num_warps = (32, 4) if outputs >= 32 * (256 if rows <= 16 else 128) else (16, 2)
    block_m = 16 if rows <= 16 else 32
    precision = "ieee"
    if dtype.itemsize == 4:
        block_n, block_k, num_stages = 2 * block_n, 32, 4
        num_warps *= 2 if rows > 32 else 1
        if arch != "gfx942" and not INTERPRETED.value:
            precision = "tf32x3"
    else:
        block_k, num_stages = (128, 3) if gated else (256, 4)
        if rows > 32:
            block_k, num_stages = 64, 4
        block_k = max(32, min(block_k, triton.next_power_of_2(depth)))
    if depth % 16:
        block_k //= 2  # what is loaded element by element is held in registers
    options = dict(_configs.compiler_options(device))
    if arch == "gfx942":
        options["matrix_instr_nonkdim"] = 16  # that of 32 rows would be another chain
    return LinearBlocks(block_m, block_n, block_k, num_warps, num_stages, precision, options)


def code_blocks(device, dtype, rows, outputs, depth, form, gated) -> tuple[LinearBlocks, int]:
    """Return how one program multiplies ``rows`` with codes, in 1 or 2 tiles.

    Each program reads the rows, which in 16 bits weigh as much as its codes, and a tile's warps
    stand side by side, so that each code becomes a number once: above 32 rows it has 64 outputs,
    whatever the SMs, above 16 too where all SMs have one. Up to 16 rows a step has two blocks of
    128 codes, so that one's products may fill the other's waits: an SM has few warps there. Then 16
    KiB of 4 bits are in flight, and of gate and up an SM holds four programs: all that an 8B
    model's layer has at once. 4 warps would spill 64 rows.
    """
    arch = _configs.architecture(device)
    block_m, block_n, num_warps, num_stages, tiles, step = 16, 32, 4, 6, 1, 128
    if dtype.itemsize == 4 or depth % 16:
        # More would spill, or what is loaded element by element: each 16 rows have programs.
        block_n, num_stages = 16 if depth % 16 else 32, 2
    elif rows <= 16 and triton.cdiv(depth, 128) % 2 == 0:
        step, num_stages = 256, {"int4": 5 - gated}.get(form, 4 - gated)
    elif rows > 32:
        block_m, block_n, num_warps, num_stages, tiles = 32, 64, 8, 4, 2
        if arch == "sm_80":
            num_stages = 3  # four of 8 bits would take 100.5 KiB of shared memory
    elif rows > 16 and outputs >= 64 * 128:
        block_m, block_n, num_stages = 32, 64, 4
    elif rows > 16:
        num_stages, tiles = 4, 2
    if block_n == 32 and outputs < 32 * 128:
        block_n, num_warps = 16, 2
    precision = "ieee"
    if dtype.itemsize == 4 and arch != "gfx942" and not INTERPRETED.value:
        precision = "tf32x3"
    options = dict(_configs.compiler_options(device))
    if arch == "gfx942":
        num_stages, options["matrix_instr_nonkdim"] = 2, 16  # as in `linear_blocks`
    blocks = LinearBlocks(block_m, block_n, step, num_warps, num_stages, precision, options)
    return blocks, tiles
