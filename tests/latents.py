"""Problems whose values are a view of their keys, as latents are, or are of another size."""

from dataclasses import replace

import torch

from tests.cases import make_problem
from tests.eight_bits import quantise

_CACHES = ("cache", "pages")


def make_latents(
    lengths=(5, 12), rows=4, *, q_heads=16, kv_heads=1, head_dim=576, v_dim=512, shared=True, **more
):
    """Build a `Problem` with values of `v_dim`: views of the keys, or where not `shared` apart."""
    p = make_problem(lengths, rows, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, **more)
    parts = (*_CACHES, "tree")
    if shared:
        return replace(p, **{f"v_{part}": getattr(p, f"k_{part}")[..., :v_dim] for part in parts})
    wide = {f"v_{part}": getattr(p, f"v_{part}") for part in parts}
    wide = {name: torch.cat([x, x.flip(-1)], -1) for name, x in wide.items()}
    return replace(p, **{name: x[..., :v_dim].contiguous() for name, x in wide.items()})


def quantise_latents(p, dtype, form):
    """Return what `quantise` does, with values that are a view of keys and have their scales."""
    v_dim = p.v_cache.shape[-1]
    stored, scales = quantise(p, dtype, form)
    views = {f"v_{part}": getattr(stored, f"k_{part}")[..., :v_dim] for part in _CACHES}
    return replace(stored, **views), {
        paged: {"k_scale": given["k_scale"], "v_scale": given["k_scale"]}
        for paged, given in scales.items()
    }
