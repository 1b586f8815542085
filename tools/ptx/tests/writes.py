"""`write_kv` in the emulator: the cases that write a cache, of 16 bits or of 8."""

import torch
from tests.writes import make_write

import specattn

from .types import DTYPES, EIGHT_BITS

CACHES = ("k_cache", "v_cache")


def _stored(case):
    """Return the arguments of a write into caches of 8 bits."""
    new = _into(case).arguments()
    caches = {n: torch.zeros(new[n].shape).to(EIGHT_BITS[case.stored]) for n in CACHES}
    scales = {}
    if case.scales == "tokens":
        scales = {n: torch.full(new["k_cache"].shape[:-1], 9.0) for n in ("k_scale", "v_scale")}
        scales["scale"] = "dynamic"
    elif case.scales == "heads":
        scales = {"k_scale": torch.linspace(0.003, 2, case.kv_heads), "v_scale": 0.01}
    return new | caches | scales


def _written(arguments):
    """Return the caches and scales of a write, as numbers that can be compared."""
    names = (*CACHES, "k_scale", "v_scale") if "scale" in arguments else CACHES
    return tuple(arguments[name].float() for name in names)


def _into(case):
    """Return a write of as many tokens as there are query rows."""
    return make_write(
        (3, case.rows),
        pages=5,
        page_size=4,
        heads=case.kv_heads,
        head_dim=case.head_dim,
        layout=case.layout,
        dtype=DTYPES[case.dtype],
        cache_dtype=DTYPES[case.cache_dtype or case.dtype],
    )


def call_of(case):
    """Return what writes, and returns what it has written."""

    def store():
        arguments = _stored(case)
        specattn.write_kv(**arguments)
        return _written(arguments)

    def call():
        write = _into(case)
        specattn.write_kv(**write.arguments())
        return (write.room,)

    return store if case.stored else call


def expect(case):
    """Return (result, result, tolerance) of every tensor: equality."""
    if case.stored:
        arguments = _stored(case)
        with specattn.use_backend("reference"):
            specattn.write_kv(**arguments)
        return [(x.double(), x, 0.0) for x in _written(arguments)]
    room = _into(case).expected()
    return [(room.double(), room, 0.0)]
