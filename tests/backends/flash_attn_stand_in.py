"""Modules with the interfaces of flash-attn 2, 3 and 4, computed by PyTorch on any device."""

from importlib.machinery import ModuleSpec
from types import ModuleType

import torch


def attention(q, k, v, lengths, scale, softcap, causal, *, shift=0, empty=-torch.inf):
    """Return `(out, lse)` as they do, lse [B, Hq, T]; ``shift`` moves the causal diagonal."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    keys, rows = torch.arange(k.shape[1]), torch.arange(q.shape[1])
    seen = (keys < lengths[:, None])[:, None, None]
    if causal:
        last = lengths[:, None] - q.shape[1] + rows + shift  # aligned to the bottom right
        seen = seen & (keys <= last[..., None])[:, None]
    seen = seen.expand(-1, q.shape[2], q.shape[1], -1)
    logits = torch.einsum("bthd,bnhd->bhtn", q.double(), k.nan_to_num()) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp().masked_fill(~seen, 0.0)
    out = torch.einsum("bhtn,bnhd->bthd", weights, v.nan_to_num())
    return out.to(q.dtype), lse.float().masked_fill(lse == -torch.inf, empty)


def gathered(pages, table):
    """Return what pages hold, request by request; entries that are not used are the first page."""
    if table is None:
        return pages
    return pages[table.where(table < len(pages), 0)].flatten(1, 2)


def with_cache(name, pages, **options):
    """Return a module with `flash_attn_with_kvcache`; ``pages`` is its name for a table."""
    module = _module(name)
    module.calls = []

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, softmax_scale=None, causal=False, softcap=0.0,
        return_softmax_lse=False, **table,
    ):  # fmt: skip
        assert return_softmax_lse
        assert table.keys() <= {pages}
        module.calls.append((k_cache.shape, causal))
        k, v = (gathered(x, table.get(pages)) for x in (k_cache, v_cache))
        return attention(q, k, v, cache_seqlens, softmax_scale, softcap, causal, **options)

    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def varlen(name):
    """Return a module with flash-attn 4's `flash_attn_varlen_func`."""
    module = _module(name)
    module.calls = []

    def flash_attn_varlen_func(
        q, k, v, *, seqused_k, page_table=None, softmax_scale=None, causal=False, softcap=0.0,
        return_lse=False,
    ):  # fmt: skip
        assert return_lse
        module.calls.append((k.shape, causal))
        k, v = (gathered(x, page_table) for x in (k, v))
        return attention(q, k, v, seqused_k, softmax_scale, softcap, causal)

    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def _module(name):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module
