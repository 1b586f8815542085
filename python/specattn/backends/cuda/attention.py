"""Plans launches of `decode`, every primitive's attention for up to 64 rows per KV head."""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch

from ... import attention_plans, gpu_record
from ...call_forms import NotServed
from ...reference._eight_bits import EIGHT_BITS
from ..backend import operator_named
from .build import Device, Program
from .launch import Plan
from .shape import HEAD_DIMS, MOST_ROWS, Shape, shape_of

# As csrc/cuda/params.cuh has them, in its order.
ADDRESSES = (
    "q", "k_cache", "v_cache", "k_tree", "v_tree", "lengths", "cache_seqlens", "indices",
    "block_table", "tree_mask", "depths", "cu_seqlens_q", "sinks", "out", "lse", "collected",
    "partials", "counters",
)  # fmt: skip
LONGS = (
    "q_b", "k_b", "k_h", "v_b", "v_h", "k_tree_b", "k_tree_h", "v_tree_b", "v_tree_h", "out_b",
    "lse_b", "collected_b", "collected_r", "collected_h", "indices_b", "indices_h",
)  # fmt: skip
INTS = (
    "q_t", "q_h", "k_n", "v_n", "k_tree_n", "v_tree_n", "out_t", "out_h", "lse_t", "lse_h",
    "lengths_b", "lengths_h", "cache_seqlens_b", "table_b", "mask_b", "mask_t", "depths_b",
    "T", "S", "group", "page_size", "capacity", "window",
)  # fmt: skip
MAGIC = ("page_magic", "page_shift")
LAST_INTS = ("wanted", "least", "most", "tree", "sink_type")
FLOATS = ("scale", "softcap")
COLLECTED = ("num_collected", "counters_per_head")
MOST_COLLECTED = 64
_AXES = {  # what the strides of a tensor are called, and over which dimensions
    "q": ("q", "bth"), "out": ("out", "bth"), "lse": ("lse", "bth"), "tree_mask": ("mask", "bt"),
    "k_cache": ("k", "bnh"), "v_cache": ("v", "bnh"), "k_tree": ("k_tree", "bnh"),
    "v_tree": ("v_tree", "bnh"), "lengths": ("lengths", "bh"), "depths": ("depths", "b"),
    "cache_seqlens": ("cache_seqlens", "b"), "indices": ("indices", "bh"),
    "block_table": ("table", "b"), "collected": ("collected", "brh"),
}  # fmt: skip
_OF_ROWS = {"q", "out", "lse", "k_tree", "v_tree", "tree_mask", "depths"}  # no "b" if ragged
_STRUCT = struct.Struct(
    f"<{len(ADDRESSES)}Q{len(LONGS)}q{len(INTS)}i2I{len(LAST_INTS)}i2f2i{MOST_COLLECTED}b4x"
)
_ELEMENTS = {torch.bfloat16: 0, torch.float16: 1}
_SINKS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_KINDS = {None: 0, "scores": 1, "logits": 2}
_COPIED = {"q", "k_cache", "v_cache", "k_tree", "v_tree", "out"}  # 16 bytes at a time
_NONE, _KEYS, _BEHIND = range(3)  # no tree, keys of its own, behind the prefix in the cache
_FAN_IN = 8  # states that one block merges
_WORKSPACE = 64 << 20  # bytes that partial results may take


@functools.cache
def _names(op: str) -> tuple[str, ...]:
    """Return the names of an operator's arguments, tensors called as in ADDRESSES."""
    names = [argument.name for argument in operator_named(op)._schema.arguments]
    lengths = "index_lengths" if "index_lengths" in names else "cache_seqlens"
    ours = {lengths: "lengths", "k_new": "k_tree", "v_new": "v_tree", "softmax_scale": "scale"}
    return tuple(ours.get(name, name) for name in names)


def _plan(op: str, *args, device: Device) -> Plan:
    """Plan a launch over an operator's arguments."""
    names = _names(op)
    call = dict(zip(names, args, strict=True))
    given = {name: call[name] for name in ADDRESSES if call.get(name) is not None}
    tree = _KEYS if "k_tree" in given else _NONE if "indices" in given else _BEHIND
    window, collect, rows = call.get("window"), call.get("collect"), call.get("collect_rows", ())
    if call.get("per_row"):
        raise NotServed("a list of indices for each row")
    if len(rows) > MOST_COLLECTED:
        raise NotServed(f"more than {MOST_COLLECTED} collected rows")
    q, ragged = given["q"], "cu_seqlens_q" in given
    heads, D = q.shape[-2:]
    keys = given["k_cache" if "k_cache" in given else "k_tree"]
    kv_heads = keys.shape[-2]
    batch = len(given["cu_seqlens_q"]) - 1 if ragged else len(q)
    T, group = call["max_seqlen_q"] if ragged else q.shape[1], heads // kv_heads
    apart = None
    if not call.get("per_head", True):
        apart = (batch, kv_heads, given["collected"].shape[-1])
        given["collected"] = torch.empty(apart, dtype=torch.float32, device="meta")
    _check(given, T * group, D, call["scale"])
    shape = shape_of(T * group, D, device)
    paged = "block_table" in given
    page_size = keys.shape[1] if paged else 0
    capacity = _capacity(given, page_size)
    span = capacity if window is None else min(window, capacity)
    split, slots = splits(device, shape, batch * kv_heads, span)
    states = batch * kv_heads * slots * shape.rows
    counters = _counters(slots)
    S = T
    if not ragged and tree != _BEHIND:
        S = given["k_tree"].shape[1] if tree else 0
    sizes = {
        "T": T, "S": S, "group": group, "page_size": page_size, "window": window or 0, "tree": tree,
        "capacity": given["collected"].shape[-1] if collect else 0, "scale": call["scale"],
        "softcap": call["softcap"], "num_collected": len(rows), "counters_per_head": counters,
        "sink_type": _SINKS[given["sinks"].dtype] if "sinks" in given else 0,
    }  # fmt: skip
    values = sizes | split | _magic(page_size) | _strides(given, ragged)
    defines = {
        "ELEMENT": _ELEMENTS[q.dtype], "HEAD_DIM": D, "ROWS": shape.rows, "STAGES": shape.stages,
        "BLOCKS": shape.blocks, "LOOKUP": int(paged or "indices" in given),
        "COLLECT": _KINDS[collect],
    }  # fmt: skip
    places = {name: place for place, name in enumerate(ADDRESSES)}
    served = attention_plans.served_by(
        device.name, gpu_record.Shape(op, gpu_record.DTYPES[q.dtype], D, T * group, span, batch),
        device.arch, device.multiprocessors, kv_heads, collects=bool(collect),
    )  # fmt: skip
    return Plan(
        Program("decode", tuple(defines.items())),
        (kv_heads, slots, batch),
        32 * shape.warps,
        shape.shared,
        packed(values, tuple(rows)),
        tuple(
            (places[name], names.index(name))
            for name in given
            if apart is None or name != "collected"
        ),
        tuple(names.index(name) for name in given if name in _COPIED),
        (places["partials"], 4 * states * (D + 1)) if slots > 1 else None,
        (places["counters"], batch * kv_heads * counters) if slots > 1 else None,
        (places["collected"], apart, names.index("collected")) if apart else None,
        slower=None if served == "cuda" else f"a shape for which the kernel in {served} is faster",
    )


hybrid_tree_attention = functools.partial(_plan, "hybrid_tree_attention")
verify_attention = functools.partial(_plan, "verify_attention")
sparse_gather_attention = functools.partial(_plan, "sparse_gather_attention")
tree_attention = functools.partial(_plan, "tree_attention")


def _check(given: dict[str, torch.Tensor], rows: int, D: int, scale: float) -> None:
    q = given["q"]
    if "k_cache" in given and given["k_cache"].dtype in EIGHT_BITS:
        raise NotServed("a cache of 8 bits")
    if q.dtype not in _ELEMENTS:
        raise NotServed(f"{q.dtype}")
    if rows > MOST_ROWS:
        raise NotServed(f"{rows} query rows per KV head, more than {MOST_ROWS}")
    if D not in HEAD_DIMS:
        raise NotServed(f"a head dimension of {D}, not one of {HEAD_DIMS}")
    if (v_dim := given["out"].shape[-1]) != D:
        raise NotServed(f"values of {v_dim} beside keys of {D}")
    if not scale > 0:
        raise NotServed(f"a softmax_scale of {scale}")
    for name in given.keys() & _COPIED:
        strides = zip(given[name].shape, given[name].stride(), strict=True)
        if any(size > 1 and stride % 8 for size, stride in list(strides)[:-1]):
            raise NotServed(f"{name} has strides that are no multiples of 16 bytes")
    if "sinks" in given and given["sinks"].dtype not in _SINKS:
        raise NotServed(f"sinks of {given['sinks'].dtype}")


def _capacity(given: dict[str, torch.Tensor], page_size: int) -> int:
    """Return how many keys of the prefix a request may have."""
    capacity = 0
    if "k_cache" in given and ("indices" not in given or "cache_seqlens" in given):
        pages = given["block_table"].shape[1] if page_size else 1
        capacity = pages * (page_size or given["k_cache"].shape[1])
    return max(capacity, given["indices"].shape[-1]) if "indices" in given else capacity


def splits(device: Device, shape: Shape, heads: int, span: int) -> tuple[dict[str, int], int]:
    """Return how the keys of each request are split, and the slots of the grid."""
    limit = max(1, _WORKSPACE // (4 * heads * shape.rows * (shape.head_dim + 1)))
    *split, slots = attention_plans.decode_splits(
        shape.rows, shape.blocks, device.multiprocessors, heads, span, limit=limit
    )
    return dict(zip(("wanted", "least", "most"), split, strict=True)), slots


def _counters(slots: int) -> int:
    """Return how many counters a head's combination needs: one per merge."""
    number = 0
    while slots > 1:
        slots = -(-slots // _FAN_IN)
        number += slots
    return number


def _magic(page_size: int) -> dict[str, int]:
    """Return the factor and the shift that divide a number below 2**31 by the page size."""
    if not page_size:
        return {"page_magic": 0, "page_shift": 0}
    bits = (page_size - 1).bit_length()
    return {"page_magic": -(-(1 << 31 + bits) // page_size), "page_shift": 31 + bits}


def _strides(given: dict[str, torch.Tensor], ragged: bool) -> dict[str, int]:
    """Return the strides in elements, 0 where a dimension of size 1 is shared."""
    values = {}
    for name in given.keys() & _AXES.keys():
        tensor, (prefix, letters) = given[name], _AXES[name]
        if ragged and name in _OF_ROWS:
            letters = letters[1:]
        elif name == "indices" and tensor.dim() == 2:  # one list for all heads
            letters = "b"
        elif name == "collected" and tensor.dim() == 3:  # scores, which have no rows
            letters = "bh"
        for letter, size, stride in zip(letters, tensor.shape, tensor.stride(), strict=False):
            values[f"{prefix}_{letter}"] = 0 if size == 1 else stride
    return values


def packed(values: dict[str, Any], rows: tuple[int, ...]) -> bytes:
    """Return the kernel's structure, without addresses."""
    integers = (*LONGS, *INTS, *MAGIC, *LAST_INTS)
    filled = [0] * len(ADDRESSES) + [values.get(name, 0) for name in integers]
    filled += [float(values[name]) for name in FLOATS] + [values[name] for name in COLLECTED]
    try:
        return _STRUCT.pack(*filled, *rows, *[0] * (MOST_COLLECTED - len(rows)))
    except struct.error as error:
        raise NotServed("a stride beyond 32 bits") from error
