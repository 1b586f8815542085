"""Checks of types, shapes, devices and strides, written once for all primitives.

An argument name means the same thing in every primitive, so one table says what each must be.
Everything here is known without reading device memory, so `torch.compile` can trace it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LIKE_FIRST = "like first"  # the dtype of the first argument of the call, `q` mostly
ACCUMULATED = "accumulated"  # float32, or float64 where the first argument is float64


class Spec(NamedTuple):
    """What a tensor must be: one of some shapes, in symbols, and of one of some dtypes."""

    shapes: tuple[tuple[str, ...], ...]
    dtypes: tuple[torch.dtype, ...] | str
    optional: bool = False


def _spec(shapes: str, dtypes: tuple[torch.dtype, ...] | torch.dtype | str, optional=False) -> Spec:
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    return Spec(tuple(tuple(shape.split()) for shape in shapes.split("|")), dtypes, optional)


_TREE_KEYS = _spec("B S Hk D", LIKE_FIRST)
_CACHE = _spec("B N Hk D", LIKE_FIRST)
_PAGES = _spec("pages page_size Hk D", LIKE_FIRST)
_STATE_OUT = _spec("B T Hq D", FLOATING)
_STATE_LSE = _spec("B T Hq", ACCUMULATED)

SPECS = {
    "q": _spec("B T Hq D", FLOATING),
    "k_new": _TREE_KEYS,
    "v_new": _TREE_KEYS,
    "k_tree": _TREE_KEYS,
    "v_tree": _TREE_KEYS,
    "k_cache": _CACHE,
    "v_cache": _CACHE,
    "cache_seqlens": _spec("B", torch.int32),
    "block_table": _spec("B max_pages", torch.int32, optional=True),
    "indices": _spec("B K | B Hk K", torch.int32),
    "index_lengths": _spec("B", torch.int32),
    "index_lengths_per_head": _spec("B Hk", torch.int32),
    "tree_mask": _spec("T S | 1 T S | B T S", torch.bool),
    "packed_tree_mask": _spec("T W | 1 T W | B T W", torch.int64),
    "sinks": _spec("Hq", FLOATING, optional=True),
    "scores": _spec("B N | B Hk N", (torch.float32,)),
    "outs": _spec("n B T Hq D", FLOATING),
    "lses": _spec("n B T Hq", ACCUMULATED),
    "out_a": _STATE_OUT,
    "out_b": _spec("B T Hq D", LIKE_FIRST),
    "lse_a": _STATE_LSE,
    "lse_b": _STATE_LSE,
    "out": _spec("B T Hq D", LIKE_FIRST, optional=True),
    "lse": _spec("B T Hq", ACCUMULATED, optional=True),
}
_PAGED = {"k_cache": _PAGES, "v_cache": _PAGES}


def check_tensors(**tensors) -> dict[str, int]:
    """Check every tensor by its name and return the sizes that their shapes agree on.

    With a `block_table`, caches are pages and N is what a request's pages hold. The first tensor
    sets the device and, where the table says so, the dtype of the others.

    Raises
    ------
    TypeError
        Something is no tensor, or has another dtype than asked for.
    ValueError
        A shape, a device or a stride is not as asked for.
    """
    first = next(iter(tensors))
    paged = tensors.get("block_table") is not None
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        spec = _PAGED.get(name, SPECS[name]) if paged else SPECS[name]
        if tensor is None and spec.optional:
            continue
        check_tensor(name, tensor, spec, tensors[first], first, sizes)
    if paged:
        sizes["N"] = sizes["max_pages"] * sizes["page_size"]
    _check_sizes(sizes)
    return sizes


def check_tensor(
    name: str, tensor, spec: Spec, first: torch.Tensor, first_name: str, sizes: dict[str, int]
) -> None:
    """Check one tensor against its row of the table; new symbols are added to `sizes`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    dtypes = _allowed(spec.dtypes, first)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        like = "" if isinstance(spec.dtypes, tuple) else f" as {first_name} is {first.dtype}"
        raise TypeError(f"{name}: expected {wanted}{like}, got {tensor.dtype}")
    shape = _matching(spec.shapes, tensor.shape, sizes)
    if shape is None:
        wanted = " or ".join(_in_words(shape, sizes) for shape in spec.shapes)
        raise ValueError(f"{name}: expected shape {wanted}, got {list(tensor.shape)}")
    sizes.update({symbol: n for symbol, n in zip(shape, tensor.shape) if symbol != "1"})  # noqa: B905
    if 0 in tensor.shape:
        raise ValueError(f"{name}: expected no empty dimension, got shape {list(tensor.shape)}")
    if tensor.device != first.device:
        raise ValueError(
            f"{name}: expected device {first.device} as {first_name}, got {tensor.device}"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension, got strides {list(tensor.stride())}"
        )


def check_option(name: str, value, holds: bool, expected: str) -> None:
    """Raise ValueError unless `holds`, saying what was expected of argument `name`."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse and scores: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _allowed(dtypes: tuple[torch.dtype, ...] | str, first: torch.Tensor) -> tuple:
    if dtypes == LIKE_FIRST:
        return (first.dtype,)
    if dtypes == ACCUMULATED:
        return (accumulation_dtype(first.dtype),)
    return tuple(dtypes)


def _matching(shapes, actual, sizes: dict[str, int]) -> tuple[str, ...] | None:
    """Return the first of `shapes` that `actual` fits, given the sizes known so far."""
    for shape in shapes:
        if len(shape) == len(actual) and all(
            n == (1 if symbol == "1" else sizes.get(symbol, n))
            for symbol, n in zip(shape, actual)  # noqa: B905
        ):
            return shape
    return None


def _in_words(shape: tuple[str, ...], sizes: dict[str, int]) -> str:
    named = [f"{symbol}={sizes[symbol]}" if symbol in sizes else symbol for symbol in shape]
    return f"[{', '.join(named)}]"


def _check_sizes(sizes: dict[str, int]) -> None:
    if "Hk" in sizes and "Hq" in sizes and sizes["Hq"] % sizes["Hk"]:
        raise ValueError(f"q: expected heads in multiples of Hk={sizes['Hk']}, got {sizes['Hq']}")
    if "S" in sizes and sizes["S"] < sizes["T"]:
        raise ValueError(f"q: expected rows up to the tree's S={sizes['S']}, got {sizes['T']}")
    if "D" in sizes and not (sizes["D"] % 8 == 0 and 8 <= sizes["D"] <= 256):
        raise ValueError(f"q: expected head_dim in multiples of 8 up to 256, got {sizes['D']}")
