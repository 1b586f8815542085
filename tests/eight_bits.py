"""Caches of 8 bits for tests, with scales of every form, beside the numbers that they mean."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from tests.cases import restride

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
FORMS = ("none", "number", "tensor", "heads", "tokens", "inline")
CODES = torch.arange(256, dtype=torch.uint8)


def representable(dtype):
    """Return all finite numbers of a type of 8 bits, ascending, in float64."""
    values = CODES.view(dtype).double()
    return values[values.isfinite()].unique()


def nearest(x, dtype):
    """Return each of x rounded to the nearest number of a type, even codes on ties; no NaN.

    int8 is symmetric: -128 is read, and not written.
    """
    table = representable(dtype)
    table = table[-table[-1] <= table]
    x = x.double().clamp(table[0], table[-1])
    at = torch.searchsorted(table, x.contiguous()).clamp(1, len(table) - 1)
    low, high = table[at - 1], table[at]
    even = (low.to(dtype).view(torch.uint8) & 1 == 0) if dtype != torch.int8 else low % 2 == 0
    up = (high - x < x - low) | ((high - x == x - low) & ~even)
    return torch.where(up, high, low).to(dtype)


def poison(cache):
    """Return NaN of a cache's type; int8 has none, so the largest."""
    return 127 if cache.dtype == torch.int8 else torch.nan


def quantise(p, dtype, form, *, seed=0):
    """Return `(problem, scales)`: what 8 bits mean, and the keyword arguments that say it.

    Both caches of problem `p` become random 8 bits where they hold tokens, and poison elsewhere:
    scales per token are NaN there. `form` is one of FORMS. Of the returned problem, the caches are
    the stored ones; `meant(problem, scales)` gives the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    stored, scales, pages = {}, {}, {}
    for name, size in (("k", 0.5), ("v", 1.0)):
        cache, paged = getattr(p, f"{name}_cache"), getattr(p, f"{name}_pages")
        codes, scale = _stored(cache, dtype, form, size, generator)
        page_codes, page_scale = torch.full(paged.shape, poison(codes)).to(dtype), scale
        if form in ("tokens", "inline"):
            page_scale = torch.full(paged.shape[:-1], torch.nan)
        columns = p.block_table.shape[1]
        size = paged.shape[1]
        for b, column in [(b, c) for b in range(len(p.q)) for c in range(columns)]:
            page = p.block_table[b, column]
            if page < len(paged):
                page_codes[page] = codes[b, column * size : (column + 1) * size]
                if page_scale is not scale:
                    page_scale[page] = scale[b, column * size : (column + 1) * size]
        stored[f"{name}_cache"], scales[f"{name}_scale"] = _laid_out(codes, scale, form)
        stored[f"{name}_pages"], pages[f"{name}_scale"] = _laid_out(page_codes, page_scale, form)
    return replace(p, **stored), {False: scales, True: pages}


def _stored(cache, dtype, form, size, generator):
    """Return codes of a cache, poison where it is NaN, and scales of a form."""
    live = ~cache[..., 0].isnan()
    table = representable(dtype)
    most = 4.0 if dtype != torch.int8 else 127.0
    table = table[table.abs() <= most]
    drawn = torch.randint(len(table), cache.shape, generator=generator)
    codes = torch.where(live[..., None], table[drawn], float(poison(torch.empty(0, dtype=dtype))))
    size = size / (most / 2)
    shape = {"heads": cache.shape[2:3], "tokens": cache.shape[:-1], "inline": cache.shape[:-1]}
    scale = (torch.rand(shape.get(form, ()), generator=generator) + 0.5) * size
    if form in ("tokens", "inline"):
        scale = scale.masked_fill(~live, torch.nan)
    scale = {"none": None, "number": float(scale) if scale.dim() == 0 else None}.get(form, scale)
    return codes.to(dtype), scale


def _laid_out(codes, scale, form):
    """Return codes and scales as they are; "inline": each row of codes with its scale behind it."""
    if form != "inline":
        return codes, scale
    rows = torch.empty(*codes.shape[:-1], codes.shape[-1] + 8, dtype=torch.uint8)
    rows[..., : codes.shape[-1]] = codes.view(torch.uint8)
    inside = rows.view(torch.float32)[..., codes.shape[-1] // 4]
    inside.copy_(scale)
    return rows.view(codes.dtype)[..., : codes.shape[-1]], inside


def meant(problem, scales, dtype=torch.float64):
    """Return the problem with the numbers that its 8 bits mean, in `dtype`."""
    numbers = {}
    for name in ("k", "v"):
        for cache, paged in ((f"{name}_cache", False), (f"{name}_pages", True)):
            scale = scales[paged][f"{name}_scale"]
            x = getattr(problem, cache).to(dtype)
            if isinstance(scale, torch.Tensor):
                scale = scale.to(dtype)[..., None] if scale.dim() else scale.to(dtype)
            numbers[cache] = x if scale is None else x * scale
    return replace(problem.to(dtype), **numbers)


def forms():
    """Draw a type of 8 bits and a form of scales."""
    return st.tuples(st.sampled_from(EIGHT_BITS), st.sampled_from(FORMS), st.integers(0, 2**16))


def strided(x):
    """Return x with the strides that `restride` makes."""
    return restride(x.view(torch.uint8)).view(x.dtype)
