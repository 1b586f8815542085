"""What each argument of a primitive must be, in one table for all: a name means one thing."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..reference._eight_bits import EIGHT_BITS

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LIKE_FIRST = "like first"  # the dtype of the first argument of the call, `q` mostly
ACCUMULATED = "accumulated"  # float32, or float64 where the first argument is float64
COLLECTED_LOGITS = "logits"  # bfloat16, or float64 where the first argument is float64
CACHED = "cached"  # as the first argument, or of 8 bits
CONVERTED = "converted"  # of float32, bfloat16, float16 or 8 bits, or float64 as the first argument


class Spec(NamedTuple):
    """What a tensor must be: one of some shapes, in symbols, and of one of some dtypes."""

    shapes: tuple[tuple[str, ...], ...]
    dtypes: tuple[torch.dtype, ...] | str
    optional: bool = False
    strided: bool = False  # in the last dimension, too


def _spec(
    shapes: str,
    dtypes: tuple[torch.dtype, ...] | torch.dtype | str,
    optional: bool = False,
    strided: bool = False,
) -> Spec:
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    return Spec(
        tuple(tuple(shape.split()) for shape in shapes.split("|")), dtypes, optional, strided
    )


_TREE_KEYS = _spec("B S Hk D", LIKE_FIRST)
_TREE_VALUES = _spec("B S Hk Dv", LIKE_FIRST)
_SCALE = _spec("| Hk | B N Hk", torch.float32, optional=True, strided=True)
_PAGE_SCALE = _spec("| Hk | pages page_size Hk", torch.float32, optional=True, strided=True)
_STATE_OUT = _spec("B T Hq Dv", FLOATING)
_STATE_LSE = _spec("B T Hq", ACCUMULATED)

SPECS = {
    "q": _spec("B T Hq D", FLOATING),
    "cu_seqlens_q": _spec("B+1", torch.int32),
    "k_new": _TREE_KEYS,
    "v_new": _TREE_VALUES,
    "k_tree": _TREE_KEYS,
    "v_tree": _TREE_VALUES,
    "k_cache": _spec("B N Hk D", CACHED),
    "v_cache": _spec("B N Hk Dv", CACHED),
    "k_scale": _SCALE,
    "v_scale": _SCALE,
    "cache_seqlens": _spec("B", torch.int32),
    "block_table": _spec("B max_pages", torch.int32, optional=True),
    "indices": _spec("B K | B Hk K", torch.int32),
    "index_lengths": _spec("B", torch.int32),
    "index_lengths_per_head": _spec("B Hk", torch.int32),
    "tree_mask": _spec("T S | 1 T S | B T S", torch.bool, optional=True),
    "packed_tree_mask": _spec("T W | 1 T W | B T W", torch.int64, optional=True),
    "sinks": _spec("Hq", FLOATING, optional=True),
    "scores": _spec("B N | B Hk N", (torch.float32, torch.float64)),
    "outs": _spec("n B T Hq Dv", FLOATING),
    "lses": _spec("n B T Hq", ACCUMULATED),
    "out_a": _STATE_OUT,
    "out_b": _spec("B T Hq Dv", LIKE_FIRST),
    "lse_a": _STATE_LSE,
    "lse_b": _STATE_LSE,
    "x": _spec("M K | B T K", FLOATING),
    "weight": _spec("N K", LIKE_FIRST),
    "up": _spec("N K", LIKE_FIRST, optional=True),
    "bias": _spec("N", LIKE_FIRST, optional=True),
    "scale": _spec("N groups", FLOATING, optional=True, strided=True),
    "up_scale": _spec("N groups", FLOATING, optional=True, strided=True),
    "logits": _spec("n V", FLOATING),
    "requests": _spec("n", torch.int64),
    "positions": _spec("n", torch.int64),
    "out": _spec("B T Hq Dv", LIKE_FIRST, optional=True),
    "lse": _spec("B T Hq", ACCUMULATED, optional=True),
}


def _codes(row: str, dtype: torch.dtype, *zeros: torch.dtype) -> dict[str, Spec]:
    """Return what weights are beside a `scale`; zero points are of their dtype, or of another."""
    zero = _spec("N groups", zeros or dtype, optional=True, strided=True)
    weight, up = (_spec(f"N {row}", dtype, optional=optional) for optional in (False, True))
    return {"weight": weight, "up": up, "zero": zero, "up_zero": zero}


CODES = {
    torch.int8: _codes("K", torch.int8),
    torch.uint8: _codes("packed", torch.uint8),
    torch.float8_e4m3fn: _codes("K", torch.float8_e4m3fn),
    torch.int32: _codes("words", torch.int32, torch.int8, torch.uint8),  # in tiles
}
OTHER_CODES = CODES[torch.int8] | {"weight": _spec("N K", tuple(CODES))}
ROW_LISTS = {  # by whether rows are ragged
    "indices": (_spec("B T K", torch.int32), _spec("tokens K", torch.int32)),
    "index_lengths": (_spec("B T", torch.int32), _spec("tokens", torch.int32)),
}
GUMBEL_OUT = _spec("n V", ACCUMULATED, optional=True)
LINEAR_OUT = {  # by the dimensions of `x`
    2: _spec("M N", LIKE_FIRST, optional=True),
    3: _spec("B T N", LIKE_FIRST, optional=True),
}
COLLECTED = {  # by what is collected
    "scores": _spec("B Hk N", ACCUMULATED),
    "scores of all heads": _spec("B N", ACCUMULATED),
    "logits": _spec("B R Hq N", COLLECTED_LOGITS),
}
_SCALES = {"k_scale": _PAGE_SCALE, "v_scale": _PAGE_SCALE}
PAGED = {
    "k_cache": _spec("pages page_size Hk D", CACHED),
    "v_cache": _spec("pages page_size Hk Dv", CACHED),
    **_SCALES,
}
WRITTEN = {  # what is written at `slots`, by the dimensions of `k`
    dimensions: {
        "k": _spec("tokens Hk head_dim | B T Hk head_dim", FLOATING),
        "v": _spec(f"{tokens} Hk v_head_dim", LIKE_FIRST),
        "k_cache": _spec("pages page_size Hk head_dim", CONVERTED),
        "v_cache": _spec("pages page_size Hk v_head_dim", CONVERTED),
        "slots": _spec(tokens, (torch.int64, torch.int32)),
        **_SCALES,
    }
    for dimensions, tokens in ((3, "tokens"), (4, "B T"))
}
_RAGGED_KEYS = _spec("tokens Hk D", LIKE_FIRST)
_RAGGED_VALUES = _spec("tokens Hk Dv", LIKE_FIRST)
RAGGED = {  # with `cu_seqlens_q`: the rows of all requests, one after the other
    "q": _spec("tokens Hq D", FLOATING),
    "k_new": _RAGGED_KEYS,
    "v_new": _RAGGED_VALUES,
    "k_tree": _RAGGED_KEYS,
    "v_tree": _RAGGED_VALUES,
    "tree_mask": _spec("tokens max_seqlen_q", torch.bool, optional=True),
    "packed_tree_mask": _spec("tokens W", torch.int64, optional=True),
    "out": _spec("tokens Hq Dv", LIKE_FIRST, optional=True),
    "lse": _spec("tokens Hq", ACCUMULATED, optional=True),
}


def _of_states(rows: str) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Return what layers with a state take beside `state`, and beside `conv_state`.

    `rows` are the dimensions of rows.
    """
    path = {
        "parents": _spec("T | 1 T | B T" if rows == "B T" else rows, torch.int64, optional=True),
        "nodes": _spec("B P", torch.int64, optional=True),
        "counts": _spec("B", torch.int64),
    }
    gated_delta = {
        "q": _spec(f"{rows} Hk Dk", FLOATING),
        "k": _spec(f"{rows} Hk Dk", LIKE_FIRST),
        "v": _spec(f"{rows} Hv Dv", LIKE_FIRST),
        "g": _spec(f"{rows} Hv | {rows} Hv Dk", ACCUMULATED),
        "beta": _spec(f"{rows} Hv", ACCUMULATED),
        "state": _spec("B Hv Dk Dv", ACCUMULATED),
        "stash": _spec(f"{rows} Hv Ds", ACCUMULATED),
        "out": _spec(f"{rows} Hv Dv", LIKE_FIRST, optional=True),
    }
    causal_conv = {
        "x": _spec(f"{rows} C", FLOATING),
        "weight": _spec("C K", LIKE_FIRST),
        "bias": _spec("C", LIKE_FIRST, optional=True),
        "conv_state": _spec("B K-1 C", LIKE_FIRST),
        "out": _spec(f"{rows} C", LIKE_FIRST, optional=True),
    }
    return gated_delta | path, causal_conv | path


STATES = {False: _of_states("B T"), True: _of_states("tokens")}  # by whether rows are ragged


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse and scores: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def allowed_dtypes(dtypes: tuple[torch.dtype, ...] | str, first: torch.dtype) -> tuple:
    """Return the dtypes that a row of the table allows beside a first argument of `first`."""
    if dtypes == LIKE_FIRST:
        return (first,)
    if dtypes == ACCUMULATED:
        return (accumulation_dtype(first),)
    if dtypes == COLLECTED_LOGITS:
        return (torch.float64 if first == torch.float64 else torch.bfloat16,)
    if dtypes == CACHED:
        return (first, *EIGHT_BITS)
    if dtypes == CONVERTED:
        return ((first,) if first == torch.float64 else FLOATING[:3]) + EIGHT_BITS
    return tuple(dtypes)
