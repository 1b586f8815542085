"""Caches in the memory of engines: pages of keys and values, by the order of their axes.

L layers, S sides (keys, values), P pages, N tokens of a page, H heads, C numbers of a head's row,
outermost first; "|" stands before what is padded. docs/engines.md says who has which.
"""

import math
from dataclasses import replace

import torch

SIDES_APART = ("SPNHC", "SPHNC", "PSNHC", "PSHNC", "PLSNHC", "PSHLNC", "P|SNHC")
# A token's value behind its key; vLLM 0.32 names these orders without S: LBNHC, LBHNC, ...
ROWS_TOGETHER = ("LPNHSC", "LPHNSC", "LHPNSC", "PLNHSC", "PLHNSC", "PHLNSC")
LAYOUTS = (*SIDES_APART, *ROWS_TOGETHER)
LATENT_LAYOUTS = ("PNHC", "PLNHC")  # whose values are a view of the keys

_LAYERS, _LAYER = 2, 1
_PADDING = 64  # bytes behind a page


def memory(order, shape, dtype):
    """Return an engine's memory for pages of `shape` [pages, page_size, Hk, D], NaN or 127."""
    outer, inner = _sizes(order, shape)
    poison = torch.nan if dtype.is_floating_point else 127.0
    if outer:
        inner = (math.prod(inner) + _PADDING // dtype.itemsize,)
    return torch.full((*outer, *inner), poison).to(dtype)


def views(order, room, shape):
    """Return keys and values [pages, page_size, Hk, D] of one layer, as views of `memory`."""
    outer, inner = _sizes(order, shape)
    rows = room[..., : math.prod(inner)].unflatten(-1, inner) if outer else room
    axes = order.replace("|", "")
    rows = rows.permute([axes.index(axis) for axis in "LSPNHC" if axis in axes])
    rows = rows[_LAYER] if "L" in axes else rows
    return rows.unbind() if "S" in axes else (rows, rows)


def _sizes(order, shape):
    """Return the sizes of the axes in front of "|", and of those behind it."""
    sizes = dict(zip("PNHC", shape, strict=True)) | {"L": _LAYERS, "S": 2}
    outer, _, inner = order.rpartition("|")
    return tuple(sizes[axis] for axis in outer), tuple(sizes[axis] for axis in inner)


def in_engine(problem, order):
    """Return a `Problem` whose pages lie in an engine's memory, with NaN everywhere else."""
    k_pages, v_pages = problem.k_pages, problem.v_pages
    k, v = views(order, memory(order, k_pages.shape, k_pages.dtype), k_pages.shape)
    k.copy_(k_pages)
    v = v[..., : v_pages.shape[-1]]
    v.copy_(v_pages)  # of latents the same numbers again
    return replace(problem, k_pages=k, v_pages=v)
