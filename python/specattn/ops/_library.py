"""The torch operators `torch.ops.specattn.*`: one opaque node per primitive for `torch.compile`.

A primitive's file declares its operator. Every operator writes into arguments, mostly the last, and
returns nothing, so a caller's buffers are used as they are. Shapes are checked by the public
functions; values are checked here, inside the node, before any memory is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from specattn.backends.select import chosen
from specattn.reference._attention import capacity_of

CACHE = "Tensor q, Tensor k_cache, Tensor v_cache"
STATE = "Tensor(a!) out, Tensor(b!) lse"
_LIBRARY = torch.library.Library("specattn", "DEF")


def define(signature: str) -> torch._ops.OpOverload:
    """Register the torch operator ``name(arguments)``, served by the kernels of its name."""
    op = signature.partition("(")[0]
    _LIBRARY.define(f"{signature} -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.specattn, op).default
    implementation = _implementation(op, [x.name for x in operator._schema.arguments])
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(op, implementation, device)
    torch.library.register_fake(f"specattn::{op}", lambda *args: None, lib=_LIBRARY)
    return operator


def _implementation(op: str, argument_names: list[str]) -> Callable[..., None]:
    def implementation(*args) -> None:
        device = args[0].device
        kernel, backend = chosen(op, device, args[0].dtype)
        checked = device.type == "cpu" or os.environ.get("SPECATTN_CHECK") == "1"
        if checked and not backend.checks_values:
            check_values(dict(zip(argument_names, args, strict=True)))
        kernel(*args)

    return implementation


def check_values(args: dict) -> None:
    """Raise IndexError where a length, a page or an index of an operator points nowhere."""
    if "slots" in args:
        slots, (pages, page_size) = args["slots"], args["k_cache"].shape[:2]
        _within("slots", slots, pages * page_size, slots >= 0)
    elif "k_cache" in args:
        capacity = capacity_of(args["k_cache"], args["block_table"])
        if "indices" in args:
            _check_indices(args, capacity)
        else:
            _check_prefix(args, capacity)
    elif "cache_seqlens" in args:
        _within("cache_seqlens", args["cache_seqlens"], args["scores"].shape[-1] + 1)


def _check_prefix(args: dict, capacity: int) -> None:
    lengths, table = args["cache_seqlens"], args["block_table"]
    tree_in_cache = "k_tree" in args and args["k_tree"] is None
    behind = args["q"].shape[1] if tree_in_cache else 0
    _within("cache_seqlens", lengths, capacity - behind + 1)
    if table is not None:
        pages, page_size = args["k_cache"].shape[:2]
        starts = torch.arange(table.shape[1], device=table.device) * page_size
        _within("block_table", table, pages, starts < (lengths + behind)[:, None])


def _check_indices(args: dict, capacity: int) -> None:
    indices, lengths, table = args["indices"], args["index_lengths"], args["block_table"]
    _within("index_lengths", lengths, indices.shape[-1] + 1)
    taken = torch.arange(indices.shape[-1], device=indices.device) < lengths[..., None]
    _within("indices", indices, capacity, taken)
    if table is not None:
        pages, page_size = args["k_cache"].shape[:2]
        columns = indices.masked_fill(~taken, 0).long() // page_size
        used = table.gather(1, columns.flatten(1)).view_as(columns)
        _within("block_table", used, pages, taken)


def _within(name: str, values: torch.Tensor, stop: int, where: torch.Tensor | None = None) -> None:
    """Raise IndexError unless all values, where `where` holds, lie in [0, stop)."""
    wrong = (values < 0) | (values >= stop)
    if where is not None:
        wrong &= where
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        value = values[tuple(place)].item()
        raise IndexError(f"{name}: expected values from 0 to {stop - 1}, got {value} at {place}")
