"""From logits to an accepted path: the token behind every node of a tree, and the walk along them.

Two launches. The first finds the best token of each part of a node's vocabulary, noise included;
noise is that of (seed, request, position), so what is drawn depends neither on the draft nor on how
far the walk comes. The second takes the best of all parts and walks, one program a request.
"""

import torch
import triton
import triton.language as tl

from ._launch import Prepared, launch, strides
from .add_gumbel_noise import _noise

COUNTERS = 1024  # of a part of the vocabulary, each of which makes noise for four tokens
WALKED = 1024  # results of parts that a program looks at together
NOTHING = tl.constexpr(2**31 - 1)  # a place behind all others


# fmt: off
@triton.jit(do_not_specialize=["seed", "T", "batch", "parts", "ahead", "depths_stride_b"])
def best_of_part_kernel(
    logits, depths, temperatures, places, values, tokens, seed,
    T, batch, vocabulary, parts, ahead, logits_stride_b, logits_stride_t, depths_stride_b,
    COUNTERS: tl.constexpr, SEED_IN_MEMORY: tl.constexpr,
):
    # fmt: on
    """Find the largest score of a part of one node's vocabulary, and its token: -1 beside a NaN.

    Without ``depths`` all nodes are ``ahead`` tokens behind the texts' last ones.
    """
    part, row = tl.program_id(0), tl.program_id(1)
    b, node = (row // T).to(tl.int64), (row % T).to(tl.int64)
    counter = part * COUNTERS + tl.arange(0, COUNTERS)
    if temperatures is not None:
        temperature = tl.load(temperatures + b)
    if seed is not None:
        length = tl.load(places + batch + b)
        depth = ahead
        if depths is not None:
            depth = tl.load(depths + b * depths_stride_b + node)
        position = (length + depth).to(tl.int32)
        if SEED_IN_MEMORY:
            seed = tl.load(seed)
        request = tl.load(places + b).to(tl.int32)
        words = tl.philox(seed, counter, counter * 0 + position, counter * 0 + request, counter * 0)
    p_logits = logits + b * logits_stride_b + node * logits_stride_t
    token = counter // 256 * 1024 + counter % 256  # as `add_gumbel_noise` gives words to tokens
    token = tl.max_contiguous(tl.multiple_of(token, 256), 256)
    best = tl.full([COUNTERS], float("-inf"), tl.float32)
    best_token = token
    nan = token < 0
    for w in tl.static_range(4):
        score = tl.load(p_logits + token, mask=token < vocabulary, other=float("-inf"))
        score = score.to(tl.float32)
        if temperatures is not None:
            score = tl.div_rn(score, tl.zeros_like(score) + temperature)
        if seed is not None:
            score += _noise(words[w])
        nan |= score != score
        better = score > best
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
        token += 256
    value = tl.max(best, 0)
    first = tl.min(tl.where(best == value, best_token, NOTHING), 0)
    first = tl.where(tl.max(nan.to(tl.int32), 0) > 0, -1, first)
    out = row.to(tl.int64) * parts + part
    tl.store(values + out, value)
    tl.store(tokens + out, first)


@triton.jit
def _drawn(p_values, p_tokens, n, T, parts, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the token behind each of the nodes ``n``: -1 where there is none."""
    best = tl.full([BLOCK_T], float("-inf"), tl.float32)
    drawn = tl.full([BLOCK_T], NOTHING, tl.int32)
    nan = n < 0
    for first in range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        inside = (n < T)[:, None] & (part < parts)[None, :]
        place = n[:, None] * parts + part[None, :]
        value = tl.load(p_values + place, mask=inside, other=float("-inf"))
        token = tl.load(p_tokens + place, mask=inside, other=NOTHING)
        largest = tl.max(value, 1)
        earliest = tl.min(tl.where(value == largest[:, None], token, NOTHING), 1)
        nan |= tl.min(token, 1) < 0
        drawn = tl.where(largest > best, earliest, drawn)
        best = tl.maximum(largest, best)
    return tl.where(nan | (best == float("-inf")), -1, drawn)


# fmt: off
@triton.jit(do_not_specialize=[
    "T", "parts", "depth", "tokens_stride_b", "parents_stride_b", "depths_stride_b",
    "nodes_stride_b", "report_stride_b",
])
def walk_kernel(
    values, drawn, tokens, parents, depths, nodes, report,
    T, parts, depth,
    tokens_stride_b, parents_stride_b, depths_stride_b, nodes_stride_b, report_stride_b,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
):
    # fmt: on
    """Walk down one tree along the tokens that were drawn, and say how far it came."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_T)
    first = b * T * parts
    behind = _drawn(values + first, drawn + first, n, T, parts, BLOCK_T, BLOCK_P)
    token = tl.load(tokens + b * tokens_stride_b + n, mask=n < T, other=-1)
    parent = tl.load(parents + b * parents_stride_b + n, mask=n < T, other=-1).to(tl.int32)
    level = tl.load(depths + b * depths_stride_b + n, mask=n < T, other=0)
    above = tl.maximum(parent, 0)
    nodes += b * nodes_stride_b
    report += b * report_stride_b
    # Siblings may carry the same token: all nodes whose paths read as what was emitted are reached.
    reached = (n == 0).to(tl.int32)
    node = tl.min(n, 0)
    count = node
    emitted = tl.sum(tl.where(n == node, behind, 0), 0)
    below = (parent >= 0) & (tl.gather(reached, above, 0) > 0) & (token == emitted)
    found = tl.min(tl.where(below, n, BLOCK_T), 0)
    while (found < BLOCK_T) & (count < depth):
        tl.store(report + 4 + count, emitted.to(tl.int64))
        reached = below.to(tl.int32)
        node = found
        count += 1
        emitted = tl.sum(tl.where(n == node, behind, 0), 0)
        below = (parent >= 0) & (tl.gather(reached, above, 0) > 0) & (token == emitted)
        found = tl.min(tl.where(below, n, BLOCK_T), 0)
    for step in range(0, count):  # from the last node up
        tl.store(nodes + count - 1 - step, node.to(tl.int64))
        node = tl.sum(tl.where(n == node, parent, 0), 0)
    for start in range(0, depth, BLOCK_T):
        column = start + n
        unused = (column >= count) & (column < depth)
        tl.store(nodes + column, tl.full([BLOCK_T], -1, tl.int64), mask=unused)
        tl.store(report + 4 + column, tl.full([BLOCK_T], -1, tl.int64), mask=unused)
    tl.store(report, emitted.to(tl.int64))
    tl.store(report + 1, tl.sum((parent >= 0).to(tl.int32), 0).to(tl.int64))
    tl.store(report + 2, count.to(tl.int64))
    tl.store(report + 3, tl.max(level, 0).to(tl.int64))


@triton.jit(do_not_specialize=["rows", "parts"])
def drawn_kernel(
    values, drawn, tokens, rows, parts, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr
):
    """Write the tokens that are drawn in a block of rows, 0 where there is none."""
    n = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token = _drawn(values, drawn, n, rows, parts, BLOCK_T, BLOCK_P)
    tl.store(tokens + n, tl.maximum(token, 0).to(tl.int64), mask=n < rows)


def _best_of_parts(logits, depths, ahead, temperatures, places, seed):
    """Return (values, tokens, how many each of the B * T nodes has) of parts of the vocabulary."""
    B, T, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, 4 * COUNTERS)
    values = torch.empty(B * T * parts, dtype=torch.float32, device=logits.device)
    drawn = torch.empty(B * T * parts, dtype=torch.int32, device=logits.device)
    launch(
        best_of_part_kernel, (parts, B * T),
        logits, depths, temperatures, places, values, drawn, seed,
        T, B, vocabulary, parts, ahead, *strides(logits)[:2],
        None if depths is None else strides(depths)[0],
        COUNTERS=COUNTERS, SEED_IN_MEMORY=isinstance(seed, torch.Tensor), num_warps=8,
    )  # fmt: skip
    return values, drawn, parts


def draw_behind(logits, ahead, temperatures, places, seed):
    """Return the tokens behind the last nodes of chains, int64 [B, 1], as `_draw` draws them.

    ``logits`` are [B, 1, V]; the nodes are ``ahead`` tokens behind the texts' last ones, and
    ``seed`` is int64 [1] or None. Where no token can follow it is 0.
    """
    rows = len(logits)
    values, drawn, parts = _best_of_parts(logits, None, ahead, temperatures, places, seed)
    tokens = torch.empty(rows, 1, dtype=torch.int64, device=logits.device)
    launch(
        drawn_kernel, (triton.cdiv(rows, 8),), values, drawn, tokens, rows, parts,
        BLOCK_T=8, BLOCK_P=min(triton.next_power_of_2(parts), WALKED // 8), num_warps=1,
    )  # fmt: skip
    return tokens


def _draw(logits, tokens, parents, depths, temperatures, places, seed, nodes, report):
    """Draw behind every node and walk, as `draw_and_walk` in `specattn.decoding.text.draws` does.

    ``logits`` [B, T, V], ``tokens`` int64 [B, T], ``parents`` int64 and ``depths`` int32 [1 or B,
    T], ``temperatures`` float32 [B] or None, ``places`` int64 [2, B], rows and lengths, ``seed`` as
    a signed number or None. Written are ``nodes`` int64 [B, depth] and ``report`` int64
    [B, 4 + depth]: the next token, how many were drafted and are accepted, how deep, the tokens.
    """
    B, T, _ = logits.shape
    values, drawn, parts = _best_of_parts(logits, depths, 0, temperatures, places, seed)
    block_t = max(16, triton.next_power_of_2(T))
    launch(
        walk_kernel, (B,),
        values, drawn, tokens, parents, depths, nodes, report,
        T, parts, nodes.shape[1],
        strides(tokens)[0], strides(parents)[0], strides(depths)[0],
        strides(nodes)[0], strides(report)[0],
        BLOCK_T=block_t,
        BLOCK_P=min(triton.next_power_of_2(parts), max(1, WALKED // block_t)),
        num_warps=1 if block_t <= 256 else 4,
    )  # fmt: skip


draw_and_walk = Prepared(_draw, plain=[6])
