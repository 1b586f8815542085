"""The torch operators `torch.ops.specattn.*`: one opaque node per primitive for `torch.compile`.

A primitive's file declares its operator. Every operator writes into arguments, mostly the last, and
returns nothing, so a caller's buffers are used as they are. Shapes are checked by the public
functions; values are checked here, inside the node, before any memory is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise

import torch

from ..backends.backend import NAMESPACE, operator_named
from ..backends.select import chosen
from ..call_forms import NotServed
from ..reference._attention import capacity_of

CACHE = "Tensor q, Tensor k_cache, Tensor v_cache"
STATE = "Tensor(a!) out, Tensor(b!) lse"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_implementations: dict[torch._ops.OpOverload, Callable[..., None]] = {}


def define(signature: str) -> torch._ops.OpOverload:
    """Register the torch operator ``name(arguments)``, served by the kernels of its name."""
    op = signature.partition("(")[0]
    _LIBRARY.define(f"{signature} -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    operator = operator_named(op)
    implementation = _implementation(op, [x.name for x in operator._schema.arguments])
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(op, implementation, device)
    torch.library.register_fake(f"{NAMESPACE}::{op}", lambda *args: None, lib=_LIBRARY)
    _implementations[operator] = implementation
    return operator


def call(operator: torch._ops.OpOverload, sizes: dict[str, int] | None, *args) -> None:
    """Call an operator; past torch's dispatcher where nothing would see it there.

    `sizes` are those that `check_tensors` returned for the tensors from which all of `args` and
    nothing else was made, or None: then a kernel finds anew what it knows of their forms.
    """
    if torch.compiler.is_compiling() or _is_watched():
        operator(*args)
    else:
        _implementations[operator](*args, form=getattr(sizes, "form", None))


def trims_masks(operator: torch._ops.OpOverload, q: torch.Tensor) -> bool:
    """Return whether it is certain that an operator will trim a tree's mask to a window itself."""
    if torch.compiler.is_compiling() or _is_watched():
        return False
    _, backend = chosen(operator._schema.name.split("::")[1], q.device, q.dtype)
    return backend.trims


def _is_watched() -> bool:
    """Return whether a mode, a transform, a trace or a profiler has to see every operator."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
    )


def _implementation(op: str, argument_names: list[str]) -> Callable[..., None]:
    def implementation(*args, form: object = None) -> None:
        device = args[0].device
        kernel, backend = chosen(op, device, args[0].dtype)
        unchecked = device.type == "cpu" or os.environ.get("SPECATTN_CHECK") == "1"
        declined: tuple[tuple[str, str], ...] = ()
        while True:
            if unchecked and not backend.checks_values:
                check_values(dict(zip(argument_names, args, strict=True)))
                unchecked = False
            try:
                if backend.plans:
                    kernel(*args, form=form)
                else:
                    kernel(*args)
                return
            except NotServed as reason:
                declined = (*declined, (backend.name, f"it does not serve {reason}"))
                kernel, backend = chosen(op, device, args[0].dtype, declined)

    return implementation


def check_values(args: dict) -> None:
    """Raise IndexError where a length, a page or an index of an operator points nowhere."""
    starts = args.get("cu_seqlens_q")
    if starts is not None:
        name = next(name for name in ("q", "x", "stash") if name in args)
        _check_rows(starts.tolist(), name, len(args[name]), args["max_seqlen_q"])
    if args.get("parents") is not None:
        _check_parents(args["parents"], starts)
    if "counts" in args:
        _check_path(args, starts)
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


def _check_parents(parents: torch.Tensor, starts: torch.Tensor | None) -> None:
    """Raise unless every parent comes before its children, in its own request."""
    number = torch.arange(parents.shape[-1], device=parents.device)
    if starts is not None:
        first = torch.searchsorted(starts[1:], number.to(starts.dtype), right=True)
        number = number - starts[first]
    _within("parents", parents, number.expand_as(parents), parents != -1)


def _check_path(args: dict, starts: torch.Tensor | None) -> None:
    """Raise unless counts lie within their paths, and counted nodes within their request's rows."""
    counts, nodes = args["counts"], args["nodes"]
    rows = args["stash"] if "stash" in args else args["x"]
    held = starts.diff() if starts is not None else torch.full_like(counts, rows.shape[1])
    most = held if nodes is None else held.clamp(max=nodes.shape[1])
    _within("counts", counts, most + 1)
    if nodes is not None:
        used = torch.arange(nodes.shape[1], device=nodes.device) < counts[:, None]
        _within("nodes", nodes, held[:, None].expand_as(nodes), used)


def _check_rows(starts: list[int], name: str, rows: int, most: int) -> None:
    if starts[0] != 0:
        raise IndexError(f"cu_seqlens_q: expected to begin with 0, got {starts[0]}")
    for index, (first, stop) in enumerate(pairwise(starts)):
        if stop < first:
            raise IndexError(f"cu_seqlens_q: expected no decrease, got {stop} after {first}")
        if stop - first > most:
            raise IndexError(
                f"cu_seqlens_q: expected up to max_seqlen_q={most} rows per request, "
                f"got {stop - first} of request {index}"
            )
    if starts[-1] != rows:
        raise IndexError(
            f"cu_seqlens_q: expected to end with {name}'s {rows} rows, got {starts[-1]}"
        )


def _check_prefix(args: dict, capacity: int) -> None:
    lengths, behind = args["cache_seqlens"], _tokens_behind(args)
    _within("cache_seqlens", lengths, capacity - behind + 1)
    if args["block_table"] is not None:
        _check_pages(args, lengths + behind)


def _tokens_behind(args: dict) -> int | torch.Tensor:
    """Return how many tokens of the tree lie in the cache, [B] of ragged rows."""
    if "k_tree" not in args or args["k_tree"] is not None:
        return 0
    starts = args["cu_seqlens_q"]
    return args["q"].shape[1] if starts is None else starts.diff()


def _check_pages(args: dict, lengths: torch.Tensor) -> None:
    table, (pages, page_size) = args["block_table"], args["k_cache"].shape[:2]
    starts = torch.arange(table.shape[1], device=table.device) * page_size
    _within("block_table", table, pages, starts < lengths[:, None])


def _check_indices(args: dict, capacity: int) -> None:
    indices, lengths, table = args["indices"], args["index_lengths"], args["block_table"]
    _within("index_lengths", lengths, indices.shape[-1] + 1, lengths != -1)
    starts = args["cu_seqlens_q"] if args["per_row"] else None
    whole = (lengths == -1).flatten(1).any(1) if lengths.dim() == 2 else lengths == -1
    if starts is not None:  # rows, of which each request has its own
        row = torch.arange(len(lengths), dtype=starts.dtype, device=starts.device)
        request = torch.searchsorted(starts[1:], row, right=True)
        whole = torch.zeros_like(starts[1:]).index_add_(0, request, whole.to(starts.dtype)) > 0
    if args["cache_seqlens"] is not None:
        _within("cache_seqlens", args["cache_seqlens"], capacity + 1)
        if table is not None:
            _check_pages(args, args["cache_seqlens"].where(whole, 0))
    elif whole.any():
        raise IndexError(
            f"index_lengths: expected values from 0 to {indices.shape[-1]} without cache_seqlens, "
            "got -1"
        )
    taken = torch.arange(indices.shape[-1], device=indices.device) < lengths[..., None]
    _within("indices", indices, capacity, taken)
    if table is not None:
        pages, page_size = args["k_cache"].shape[:2]
        columns = indices.masked_fill(~taken, 0).long() // page_size
        if starts is not None:
            table = table[request]
        used = table.gather(1, columns.flatten(1)).view_as(columns)
        _within("block_table", used, pages, taken)


def _within(
    name: str,
    values: torch.Tensor,
    stop: int | torch.Tensor,
    where: torch.Tensor | None = None,
) -> None:
    """Raise IndexError unless all values, where `where` holds, lie in [0, stop).

    `stop` may differ from value to value.
    """
    wrong = (values < 0) | (values >= stop)
    if where is not None:
        wrong &= where
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        value = values[tuple(place)].item()
        if isinstance(stop, torch.Tensor):
            stop = int(stop[tuple(place)])
        raise IndexError(f"{name}: expected values from 0 to {stop - 1}, got {value} at {place}")
