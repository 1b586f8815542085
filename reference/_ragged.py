"""Ragged queries: each request of a batch is a uniform call of its own."""

import functools
import inspect
from itertools import pairwise

import torch

ROWS = ("q", "k_tree", "v_tree", "k_new", "v_new", "tree_mask", "depths")
ROWS += ("k", "v", "g", "beta", "parents", "x")  # of layers with a state
ROW_LISTS = ("indices", "index_lengths")  # where these are `per_row`


def by_request(function):
    """Let a primitive over uniform queries take ragged ones too.

    With `cu_seqlens_q` [B + 1], request b owns the rows from `cu_seqlens_q[b]` to
    `cu_seqlens_q[b + 1]`, or none. Tensors of rows then have one dimension [tokens] instead of
    [B, T]; q [tokens, Hq, D] gives out [tokens, Hq, D]. Columns of `tree_mask` [tokens, ..] count
    the keys of a row's own request; those that it does not have are not read. `collect_rows` counts
    the rows of each request; one that it does not have is its last, or its first if negative. A
    request without rows collects -inf. `max_seqlen_q` bounds launches, so nothing here reads it.
    """
    parameters = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        arguments = parameters.bind(*args, **kwargs).arguments
        starts = arguments.pop("cu_seqlens_q", None)
        arguments.pop("max_seqlen_q", None)
        if starts is None:
            return function(**arguments)
        results = [
            function(**_request(arguments, index, slice(first, stop))) if first < stop else None
            for index, (first, stop) in enumerate(pairwise(starts.tolist()))
        ]
        there = [result for result in results if result is not None]
        if isinstance(there[0], torch.Tensor):
            return torch.cat(there, 1)[0]
        out, lse, *collected = zip(*there, strict=True)
        state = (torch.cat(out, 1)[0], torch.cat(lse, 1)[0])
        if not collected:
            return state
        nothing = torch.full_like(collected[0][0], -torch.inf)
        return *state, torch.cat([result[2] if result else nothing for result in results])

    return wrapper


def shared_by_requests(arguments):
    """Return the names of tensors that all requests have together, by the arguments of a call."""
    shared = {"sinks", "weight", "bias"} | {
        name
        for name in ("k_scale", "v_scale")
        if arguments.get(name) is not None and arguments[name].dim() < 3
    }
    if arguments.get("block_table") is not None:
        shared |= {"k_cache", "v_cache", "k_scale", "v_scale"}
    return shared


def _request(arguments, index, rows):
    """Return the arguments of a uniform call for one request."""
    shared = shared_by_requests(arguments)
    count = rows.stop - rows.start
    of_rows = (*ROWS, *ROW_LISTS) if arguments.get("per_row") else ROWS

    def alone(name, value):
        if name == "collect_rows":
            return [max(row, -count) if row < 0 else min(row, count - 1) for row in value]
        if not isinstance(value, torch.Tensor) or name in shared:
            return value
        if name == "tree_mask" and value.dtype == torch.bool:
            value = value[:, :count]
        return value[None, rows] if name in of_rows else value[index : index + 1]

    return {name: alone(name, value) for name, value in arguments.items()}
