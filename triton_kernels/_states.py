"""What the kernels of layers with a state share: a request's rows, and its tree's paths as bits."""

# Branches on compile-time flags must stay statements of their own: the other side is not compiled.
# ruff: noqa: SIM102

import triton
import triton.language as tl

MOST_ROWS = 64  # of a request: its paths are words of 64 bits


def row_strides(x, ragged):
    """Return the strides over requests and rows; ragged rows are those of all requests."""
    if x is None:
        return 0, 0
    return (0, x.stride(0)) if ragged else (0 if len(x) == 1 else x.stride(0), x.stride(1))


@triton.jit
def rows_of(b, cu_seqlens_q, T):
    """Return (first row, rows) of a request; the first counts only rows that are ragged."""
    first = b * 0
    if cu_seqlens_q is not None:
        first = tl.load(cu_seqlens_q + b)
        T = tl.load(cu_seqlens_q + b + 1) - first
    return first.to(tl.int64), T


@triton.jit
def parents_of(parents, i, T):
    """Return each node's parent, -1 behind the state; those of a chain where none are given."""
    above = i - 1
    if parents is not None:
        above = tl.load(parents + i, mask=i < T, other=-1).to(tl.int32)
    return above


@triton.jit
def paths_of(above, i):
    """Return words [T] with a bit for every node of a row's path, itself among them.

    A row's word takes in that of the farthest node known above it, until there is none: each step
    doubles what is known.
    """
    word = tl.full(i.shape, 1, tl.int64) << i
    reached = 1
    while reached < i.shape[0]:
        hit = above[:, None] == i[None, :]
        word |= tl.sum(tl.where(hit, word[None, :], 0), 1)
        above = tl.sum(tl.where(hit, above[None, :] + 1, 0), 1) - 1
        reached *= 2
    return word
