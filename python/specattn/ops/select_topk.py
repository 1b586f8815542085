"""Deterministic top-k selection of the cached tokens that a sparse draft sees."""

from __future__ import annotations

import torch

from ..reference.select_topk import selection_size
from ._check import check_option, check_tensors
from ._library import call, define
from ._options import number
from .cost import Cost, Sizes

_operator = define(
    "select_topk(Tensor scores, Tensor cache_seqlens, float? ratio, int? budget, int min_tokens, "
    "int keep_first, int keep_last, Tensor(a!) indices, Tensor(b!) index_lengths)"
)


def select_topk(
    scores: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    ratio: float | None = None,
    budget: int | None = None,
    min_tokens: int = 0,
    keep_first: int = 0,
    keep_last: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the tokens with the highest scores of every request, or of every KV head.

    Of n tokens, ``max(ceil(ratio * n) or budget, min_tokens, keep_first + keep_last)`` are taken,
    or all n if there are fewer. The same scores always give the same tokens: the later of two
    equal scores ranks first, -inf and NaN rank last (Vegas, arXiv 2602.07223, section 3.2).

    Parameters
    ----------
    scores : Tensor [B, N] or [B, Hk, N], float32; float64 on the reference
        What `importance_scores` and `verify_attention` return.
    cache_seqlens : Tensor [B], int32
        Tokens of each request; scores from there on are not read.
    ratio : float, optional
        Share of each request's tokens to take, in (0, 1].
    budget : int, optional
        Number of tokens to take. Exactly one of `ratio` and `budget` must be given.
    min_tokens : int
        Least number of tokens to take.
    keep_first, keep_last : int
        The first and the last tokens of a request that are always taken; they count.

    Returns
    -------
    indices : Tensor [B, K] or [B, Hk, K], int32
        Positions in ascending order, then -1. K is the number taken of N tokens.
    index_lengths : Tensor [B] or [B, Hk], int32
        How many positions were taken.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device, stride or value; the message names it.
    IndexError
        A length lies outside [0, N]. On a GPU only with ``SPECATTN_CHECK=1``.

    Examples
    --------
    >>> import torch, specattn
    >>> scores = torch.tensor([[0.1, 0.9, 0.3, 0.9, 0.2, 0.0]])
    >>> lengths = torch.tensor([5], dtype=torch.int32)
    >>> indices, index_lengths = specattn.select_topk(scores, lengths, budget=3, keep_first=1)
    >>> indices.tolist(), index_lengths.tolist()
    ([[0, 1, 3]], [3])
    """
    sizes = check_tensors(scores=scores, cache_seqlens=cache_seqlens)
    one = (ratio is None) != (budget is None)
    check_option("ratio, budget", (ratio, budget), one, "exactly one of the two")
    ratio, budget = number("ratio", ratio), number("budget", budget)
    floors = {"min_tokens": min_tokens, "keep_first": keep_first, "keep_last": keep_last}
    least, first, last = (min(number(name, n), sizes["N"]) for name, n in floors.items())
    budget = None if budget is None else min(budget, sizes["N"])
    width = selection_size(sizes["N"], ratio, budget, least, first + last)
    shape = (*scores.shape[:-1], width)
    indices = torch.empty(shape, dtype=torch.int32, device=scores.device)
    index_lengths = torch.empty(shape[:-1], dtype=torch.int32, device=scores.device)
    outputs = (indices, index_lengths)
    call(_operator, sizes, scores, cache_seqlens, ratio, budget, least, first, last, *outputs)
    return indices, index_lengths


def cost(s: Sizes) -> Cost:
    """Count the scores in, positions and their number out; operations are comparisons, one each."""
    rows = s.B * s.score_rows
    return Cost(4 * rows * s.L + 4 * s.indices, 4 * rows * (s.selected + 1), rows * s.L)
