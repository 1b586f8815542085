"""New keys and values, written into their slots of a cache."""


def write_kv(k, v, k_cache, v_cache, slots):
    """Write k, v [.., Hk, D] into caches [pages, page_size, Hk, D], in place.

    Slot s [..] is place ``s % page_size`` of page ``s // page_size``; a contiguous cache is one
    page for each request. Tokens with a negative slot are left out.
    """
    slots = slots.flatten().long()
    kept = slots >= 0
    page_size = k_cache.shape[1]
    places = slots[kept] // page_size, slots[kept] % page_size
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache[places] = new.flatten(0, -3)[kept].to(cache.dtype)
