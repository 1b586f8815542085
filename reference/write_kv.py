"""New keys and values, written into their slots of a cache."""

from ._eight_bits import EIGHT_BITS, dynamic_scale, quantised


def write_kv(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_scale=None,
    v_scale=None,
    new_k_scale=None,
    new_v_scale=None,
):
    """Write k, v [.., Hk, D] into caches [pages, page_size, Hk, D], in place; v may be None.

    Slot s [..] is place ``s % page_size`` of page ``s // page_size``; a contiguous cache is one
    page for each request. Tokens with a negative slot are left out. A cache of 8 bits holds them
    over `k_scale` and `v_scale`, [Hk] or [pages, page_size, Hk], or over scales of their own, which
    are then written to `new_k_scale` and `new_v_scale` [pages, page_size, Hk].
    """
    slots = slots.flatten().long()
    kept = slots >= 0
    page_size = k_cache.shape[1]
    places = slots[kept] // page_size, slots[kept] % page_size
    stores = [(k, k_cache, k_scale, new_k_scale)]
    if v is not None:
        stores.append((v, v_cache, v_scale, new_v_scale))
    for new, cache, scale, new_scale in stores:
        tokens = new.flatten(0, -3)[kept]
        if cache.dtype in EIGHT_BITS:
            if new_scale is not None:
                scale = new_scale[places] = dynamic_scale(tokens, cache.dtype)
            elif scale is not None and scale.dim() == 3:
                scale = scale[places]
            tokens = quantised(tokens, scale, cache.dtype)
        cache[places] = tokens.to(cache.dtype)
