"""The best children of the nodes of a draft's tree, level by level: two launches, or three.

Parts of the vocabulary each find their own best logits and the sum of their exponentials; a node
merges those of its parts; a request chooses among the children of its nodes. What is compared is a
key of 64 bits: a number's bits, so that they order as numbers do, above those of its place, so that
of equal ones the first wins, and no two are equal. Whatever order they come in, the best are the
same. NaN is the greatest, as torch has it.
"""

import torch
import triton
import triton.language as tl

from . import _sizes
from ._blocks import follow_previous
from ._eight_bits import is_nan
from ._launch import early, launch, strides

NOTHING = tl.constexpr(-(2**63))  # less than the key of any number
WORD_BITS = tl.constexpr(64)


@triton.jit
def _key(x, place):
    """Return keys of float32 at places below 2^31."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    ordered = tl.where(is_nan(x), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _number_and_place(key):
    """Return what `_key` was made of."""
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _greatest(keys, width, BLOCK_W: tl.constexpr):
    """Return the ``width`` greatest of different keys [N], descending: [BLOCK_W]."""
    rank = tl.arange(0, BLOCK_W)
    found = tl.full([BLOCK_W], NOTHING, tl.int64)
    for i in range(0, width):
        best = tl.max(keys, 0)
        found = tl.where(rank == i, best, found)
        keys = tl.where(keys == best, NOTHING, keys)
    return found


# fmt: off
@triton.jit(do_not_specialize=["nodes", "width", "parts", "stride_b"])
def part_kernel(
    logits, keys, sums, nodes, vocabulary, parts, width, stride_b, stride_n,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Find the greatest logits of a part of one node's, and (maximum, sum of exponentials)."""
    follow_previous(PDL)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_logits = logits + (row // nodes) * stride_b + (row % nodes) * stride_n
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    x = tl.load(p_logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    found = _greatest(tl.where(inside, _key(x, token), NOTHING), width, BLOCK_W)
    rank = tl.arange(0, BLOCK_W)
    tl.store(keys + (row * parts + part) * width + rank, found, mask=rank < width)
    most = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(most == float("-inf"), 0.0, most)), 0)
    tl.store(sums + (row * parts + part) * 2, most)
    tl.store(sums + (row * parts + part) * 2 + 1, total)


# fmt: off
@triton.jit(do_not_specialize=["nodes", "parts", "width", "stride_b", "stride_n"])
def node_kernel(
    keys, sums, scores, tokens, paths, nodes, parts, width, stride_b, stride_n,
    BLOCK_P: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Write the best children of one node, and the log-probabilities of their paths."""
    follow_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    part, candidate = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK)
    p_sums = sums + (row * parts + part) * 2
    most = tl.load(p_sums, mask=part < parts, other=float("-inf"))
    total = tl.load(p_sums + 1, mask=part < parts, other=0.0)
    key = tl.load(
        keys + row * parts * width + candidate, mask=candidate < parts * width, other=NOTHING
    )
    score = tl.load(scores + (row // nodes) * stride_b + (row % nodes) * stride_n)
    top = tl.max(most, 0)
    # A part without any probability says nothing; where no part has any, all is NaN.
    log_sum = tl.log(tl.sum(tl.where(total == 0.0, 0.0, total * tl.exp(most - top)), 0))
    rank = tl.arange(0, BLOCK_W)
    logit, token = _number_and_place(_greatest(key, width, BLOCK_W))
    # The two are never added: a large logit would take the digits of the other.
    path = score + ((logit - top) - log_sum)
    tl.store(tokens + row * width + rank, token.to(tl.int64), mask=rank < width)
    tl.store(paths + row * width + rank, path, mask=rank < width)


# All that a tree's size decides, so that no draft of another size compiles.
VARYING = [
    "candidates", "children", "width", "words", "first", "parent_first", "parent_step",
    "tokens_stride", "scores_stride", "masks_stride_b", "masks_stride_n",
]  # fmt: skip


# fmt: off
@triton.jit(do_not_specialize=VARYING)
def choose_kernel(
    tokens, scores, masks, chosen, best_tokens, best_scores, parents, best_masks,
    candidates, children, width, words, first, parent_first, parent_step,
    tokens_stride, scores_stride, masks_stride_b, masks_stride_n,
    BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):
    # fmt: on
    """Choose among the candidates of one request; ``first`` is the number of the first chosen."""
    follow_previous(PDL)
    b = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    score = tl.load(scores + b * scores_stride + place, mask=place < candidates, other=0.0)
    key = tl.where(place < candidates, _key(score, place), NOTHING)
    best, at = _number_and_place(_greatest(key, width, BLOCK_W))
    rank = tl.arange(0, BLOCK_W)
    found = rank < width
    at = tl.where(found, at, 0)
    parent = (at // children).to(tl.int64)
    token = tl.load(tokens + b * tokens_stride + at, mask=found, other=0)
    to = b * width + rank
    if chosen is not None:
        tl.store(chosen + to, at.to(tl.int64), mask=found)
    tl.store(best_tokens + to, token, mask=found)
    tl.store(best_scores + to, best, mask=found)
    tl.store(parents + to, parent + parent_first + b * parent_step, mask=found)
    word = tl.arange(0, WORDS)
    both = found[:, None] & (word < words)[None, :]
    p_mask = masks + b * masks_stride_b + parent[:, None] * masks_stride_n + word[None, :]
    seen = tl.load(p_mask, mask=both, other=0)
    own = (first + rank)[:, None]
    itself = tl.full([BLOCK_W, WORDS], 1, tl.int64) << (own % WORD_BITS).to(tl.int64)
    seen = tl.where(own // WORD_BITS == word[None, :], seen | itself, seen)
    tl.store(best_masks + to[:, None] * words + word[None, :], seen, mask=both)


def children(logits, scores, width):
    """Return every node's best children and their paths' log-probabilities: [B, n, width].

    ``logits`` are [B, n, V], ``scores`` float32 [B, n]; ``width`` is at most V. They descend by
    logits, and of equal ones the first token comes first.
    """
    B, nodes, vocabulary = logits.shape
    block, num_warps = _sizes.part_blocks()
    rows, parts, block_w = B * nodes, triton.cdiv(vocabulary, block), _sizes.rank_block(width)
    plain = {"device": logits.device}
    keys = torch.empty(rows, parts, width, dtype=torch.int64, **plain)
    sums = torch.empty(rows, parts, 2, dtype=torch.float32, **plain)
    tokens = torch.empty(B, nodes, width, dtype=torch.int64, **plain)
    paths = torch.empty(B, nodes, width, dtype=torch.float32, **plain)
    launch(
        part_kernel, (parts, rows),
        logits, keys, sums, nodes, vocabulary, parts, width, *strides(logits)[:2],
        BLOCK=block, BLOCK_W=block_w, num_warps=num_warps, **early(logits.device),
    )  # fmt: skip
    block, num_warps = _sizes.choice_blocks(parts * max(width, 8))
    launch(
        node_kernel, (rows,),
        keys, sums, scores, tokens, paths, nodes, parts, width, *strides(scores),
        BLOCK_P=_padded(parts), BLOCK=block, BLOCK_W=block_w, num_warps=num_warps,
        **early(logits.device),
    )  # fmt: skip
    return tokens, paths


def best_children(logits, scores, masks, first, width):
    """Return tokens, scores, parents by number and masks of the best paths that continue a level.

    Given are logits [B, n, V], scores [B, n] and packed masks [B, n, words] of its nodes, of which
    ``first`` is the number of the first. All that is returned is [B, width, ..].
    """
    nodes, vocabulary = logits.shape[1:]
    found = children(logits, scores, min(width, vocabulary))
    _, *best = _chosen(*found, masks, width, first + nodes, first, 0, None)
    return tuple(best)


def expand_best(tokens, scores, masks, first, width):
    """Return which candidates of a level are expanded next, [B, width, ..], best first.

    Candidates are tokens and scores [B, n, children], ``masks`` [B, n, words] their parents',
    ``first`` is the number of the first chosen node. Returned are their places, tokens and scores,
    their parents' rows among those of all requests, and masks.
    """
    chosen = torch.empty(len(tokens), width, dtype=torch.int64, device=tokens.device)
    return _chosen(tokens, scores, masks, width, first, 0, tokens.shape[1], chosen)


def _chosen(tokens, scores, masks, width, first, parent_first, parent_step, chosen):
    tokens, scores, per_node = tokens.flatten(1), scores.flatten(1), tokens.shape[2]
    (B, candidates), words, plain = tokens.shape, masks.shape[-1], {"device": tokens.device}
    best_tokens, parents = (torch.empty(B, width, dtype=torch.int64, **plain) for _ in range(2))
    best_scores = torch.empty(B, width, dtype=torch.float32, **plain)
    best_masks = torch.empty(B, width, words, dtype=torch.int64, **plain)
    block, num_warps = _sizes.choice_blocks(candidates)
    launch(
        choose_kernel, (B,),
        tokens, scores, masks, chosen, best_tokens, best_scores, parents, best_masks,
        candidates, per_node, width, words, first, parent_first, parent_step,
        tokens.stride(0), scores.stride(0), *strides(masks)[:2],
        BLOCK=block, BLOCK_W=_sizes.rank_block(width), WORDS=max(2, _padded(words)),
        num_warps=num_warps,
        **early(tokens.device),
    )  # fmt: skip
    return chosen, best_tokens, best_scores, parents, best_masks


def _padded(count):
    return triton.next_power_of_2(count)
