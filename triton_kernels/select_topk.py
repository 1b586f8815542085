"""Deterministic top-k selection of the cached tokens that a sparse draft sees, without a sort.

One program per row of scores. A score's bits become an unsigned key that orders as the selection
does: tokens that are always kept above every score, dead ones below. Four histograms of eight bits
each find the key of the last token taken, and how many of those that equal it are; one scan in the
order of positions then writes what lies above and the latest equals. All counts are of integers, so
no order of threads or programs shows. Up to 16,384 scores stay in registers and are read once; more
would spill, as all do before Triton 3.7, whose histograms take more registers: they are read five
times, four of them from a cache.
"""

import struct

import triton
import triton.language as tl

from . import _configs
from ._launch import launch, strides

# 0.07 * 100 is 7.000000000000001 in binary: without this, rounding up would take an eighth token.
ROUNDING_SLACK = tl.constexpr(1e-6)
# Scores that one program of so many warps holds.
_TILES = {} if _configs.UNFENCED else {4096: 16, 16384: 16}
_LOOPED = (4096, 8)  # where they do not fit


@triton.jit
def _keys(p_score, n, length, keep_first, keep_last):
    """Load the scores of positions ``n`` as unsigned keys that order as they rank."""
    score = tl.load(p_score + n, mask=n < length, other=0.0).to(tl.float32)
    score = tl.where(score == score, score, float("-inf")) + 0.0  # NaN ranks as -inf, -0.0 as 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where((n < keep_first) | (n >= length - keep_last), 0x7FFFFFFF, ordered)
    key = ordered.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(n < length, key, 0)


@triton.jit
def _digits(key, shift: tl.constexpr, above):
    """Count the 8 bits at ``shift`` of those keys whose higher bits are ``above``."""
    alike = key == key
    if shift < 24:
        alike = (key >> (shift + 8)) == above
    return tl.histogram(((key >> shift) & 0xFF).to(tl.int32), 256, mask=alike)


@triton.jit
def _write(key, n, last, skipped, greater, equal, p_index, width):
    """Write the taken positions of a tile; return how many lay above and at the last key so far."""
    above, at = key > last, key == last
    packed = at.to(tl.uint32) * 65536 + above.to(tl.uint32)  # fewer than 65536 of each
    before = tl.cumsum(packed, 0) - packed
    greater_before = greater + (before & 0xFFFF).to(tl.int32)
    equal_before = equal + (before >> 16).to(tl.int32)
    taken = above | (at & (equal_before >= skipped))
    place = greater_before + tl.maximum(equal_before - skipped, 0)
    tl.store(p_index + place, n, mask=taken & (place < width))
    return greater + tl.sum(above.to(tl.int32), 0), equal + tl.sum(at.to(tl.int32), 0)


VARYING = [
    "cache_seqlens", "index_lengths", "requests", "heads", "width", "ratio", "budget", "least",
    "keep_first", "keep_last", "scores_stride_b", "scores_stride_h", "lengths_stride_b",
    "indices_stride_b", "indices_stride_h", "counts_stride_b", "counts_stride_h",
]  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def select_kernel(
    scores, cache_seqlens, indices, index_lengths,
    requests, heads, width, ratio, budget, least, keep_first, keep_last,
    scores_stride_b, scores_stride_h, lengths_stride_b,
    indices_stride_b, indices_stride_h, counts_stride_b, counts_stride_h,
    FOLLOWED: tl.constexpr, LOOPED: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    """Select from one row; ``ratio`` holds the bits of a float64, or is None: then ``budget``."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    b = row % requests
    length = tl.load(cache_seqlens + b * lengths_stride_b)
    wanted = budget
    if ratio is not None:
        share = ratio.to(tl.float64, bitcast=True) * length.to(tl.float64)
        wanted = tl.ceil(share - ROUNDING_SLACK).to(tl.int32)
    count = tl.minimum(tl.maximum(wanted, least), length)
    p_count = index_lengths + b * counts_stride_b + h * counts_stride_h
    tl.store(p_count, count, mask=row < requests)

    p_score = scores + row * scores_stride_b + h * scores_stride_h
    n = tl.arange(0, BLOCK_N)
    if not LOOPED:  # in four parts, since what is made of a part takes registers as well
        key_a = _keys(p_score, n, length, keep_first, keep_last)
        key_b = _keys(p_score, n + BLOCK_N, length, keep_first, keep_last)
        key_c = _keys(p_score, n + 2 * BLOCK_N, length, keep_first, keep_last)
        key_d = _keys(p_score, n + 3 * BLOCK_N, length, keep_first, keep_last)
    last = count.to(tl.uint32) * 0  # the key of the last token taken, digit by digit
    missing = count  # how many of those that have its digits so far are taken
    alike = count  # how many have them
    digit = tl.arange(0, 256)
    for step in tl.static_range(4):
        if LOOPED:
            found = tl.zeros([256], tl.int32)
            for n0 in range(0, length, BLOCK_N):
                key = _keys(p_score, n0 + n, length, keep_first, keep_last)
                found += _digits(key, 24 - 8 * step, last)
        else:
            found = _digits(key_a, 24 - 8 * step, last)
            found += _digits(key_b, 24 - 8 * step, last)
            found += _digits(key_c, 24 - 8 * step, last)
            found += _digits(key_d, 24 - 8 * step, last)
        from_here = tl.sum(found, 0) - tl.cumsum(found, 0) + found  # with this digit or a higher
        chosen = tl.maximum(tl.sum((from_here >= missing).to(tl.int32), 0) - 1, 0)
        alike = tl.sum(tl.where(digit == chosen, found, 0), 0)
        missing -= tl.sum(tl.where(digit > chosen, found, 0), 0)
        last = last * 256 + chosen.to(tl.uint32)

    p_index = indices + row * indices_stride_b + h * indices_stride_h
    skipped = alike - missing
    if count > 0:
        greater = count * 0
        equal = count * 0
        if LOOPED:
            for n0 in range(0, length, BLOCK_N):
                key = _keys(p_score, n0 + n, length, keep_first, keep_last)
                greater, equal = _write(
                    key, n0 + n, last, skipped, greater, equal, p_index, width
                )
        else:
            greater, equal = _write(key_a, n, last, skipped, greater, equal, p_index, width)
            n += BLOCK_N
            greater, equal = _write(key_b, n, last, skipped, greater, equal, p_index, width)
            n += BLOCK_N
            greater, equal = _write(key_c, n, last, skipped, greater, equal, p_index, width)
            n += BLOCK_N
            _write(key_d, n, last, skipped, greater, equal, p_index, width)
    for n0 in range(count // 1024 * 1024, width, 1024):
        place = n0 + tl.arange(0, 1024)
        behind = tl.full([1024], -1, tl.int32)
        if FOLLOWED:
            behind = length - count + place
        tl.store(p_index + place, behind, mask=(place >= count) & (place < width))


def select_topk(
    scores,
    cache_seqlens,
    ratio,
    budget,
    min_tokens,
    keep_first,
    keep_last,
    indices,
    index_lengths,
    *,
    followed=False,
):
    """Write the chosen positions, ascending and padded with -1, and how many they are.

    ``scores`` [B, N] or [B, Hk, N], ``indices`` int32 [B, K] or [B, Hk, K], ``index_lengths`` int32
    [B] or [B, Hk]. Ties go to the later position; NaN and -inf come last.

    ``followed``: in place of -1 come the positions behind the request's scores, as many as there is
    room for. Scores and indices may be of many layers, [layers * B, ...], beside lengths of one.
    """
    if scores.dim() == 2:
        scores, indices, index_lengths = scores[:, None], indices[:, None], index_lengths[:, None]
    rows, heads, capacity = scores.shape
    held = next((size for size in _TILES if capacity <= size), None)
    block_n, num_warps = _LOOPED if held is None else (held // 4, _TILES[held])
    bits = None if ratio is None else struct.unpack("<q", struct.pack("<d", ratio))[0]
    launch(
        select_kernel, (rows * heads,),
        scores, cache_seqlens, indices, index_lengths,
        len(cache_seqlens), heads, indices.shape[-1],
        bits, 0 if budget is None else min(budget, capacity),
        max(min_tokens, keep_first + keep_last), keep_first, keep_last,
        *strides(scores)[:2],
        *strides(cache_seqlens),
        *strides(indices)[:2],
        *strides(index_lengths),
        FOLLOWED=followed,
        LOOPED=held is None,
        BLOCK_N=block_n,
        num_warps=num_warps,
        **_options(scores.device, num_warps),
        enable_fp_fusion=False,  # the product is rounded before it is compared, as in the reference
    )  # fmt: skip


def _options(device, num_warps):
    """Let the compiler use all registers that so many warps may have, on GPUs that say so."""
    if not _configs.compiler_options(device):
        return {}
    return {"maxnreg": min(255, 2048 // num_warps)}
