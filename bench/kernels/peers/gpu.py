"""Libraries for GPUs, called as their documentation says; tests hold the calls against fakes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable

import torch

from specattn import flash_attention

from .task import Attention, Peer, needs

XFORMERS = ("mslk.attention.tree_attention", "xformers.ops.tree_attention")
_WORKSPACE = 128 << 20  # bytes, as FlashInfer's documentation takes


def needs_one(modules: Iterable[str], device: torch.device) -> str | None:
    """Return why none of some libraries can be a peer here, which is the first one's reason."""
    reasons = [needs(module, device) for module in modules]
    return None if None in reasons else reasons[0]


def varlen(task: Attention) -> dict[str, Peer]:
    """Return torch.nn.attention.varlen, flash attention over packed requests, for chains."""
    from torch.nn.attention.varlen import varlen_attn

    q, rows = task.q, task.q.shape[1]
    if not task.chain or q.dtype == torch.float32:
        return {}
    batch, length = task.keys_and_values()[0].shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)

    def packed() -> dict[str, torch.Tensor]:
        k, v = (x.flatten(0, 1) for x in task.keys_and_values())
        where = (starts * rows, starts * length, rows, length)
        grouped = q.shape[2] != k.shape[1]
        out = varlen_attn(q.flatten(0, 1), k, v, *where, window_size=(-1, 0), enable_gqa=grouped)
        return {"out": out.view_as(q)}

    return {"torch varlen": packed}


def flash_attn(name: str, task: Attention) -> dict[str, Peer]:
    """Return the calls of one of `flash_attention.MODULES`.

    They have no custom masks, so chains only; the cache is read in place, by 4 a view of what is
    in use.
    """
    p, q = task.prefix, task.q
    library = flash_attention.loaded(name)
    if p is None or not task.chain or q.dtype == torch.float32 or isinstance(library, str):
        return {}
    whole = name == "flash-attn 4" and p.block_table is None
    caches = task.keys_and_values() if whole else (p.k_cache, p.v_cache)
    lengths = p.lengths + q.shape[1]
    found = flash_attention.calls(name, library, q, *caches, lengths, p.block_table)
    return {form: lambda call=call: {"out": call()} for form, call in found.items()}


def flashinfer(task: Attention) -> dict[str, Peer]:
    """Return decoding for one row, else prefill with the tree as a mask; planning is not timed."""
    import flashinfer

    q, p = task.q, task.prefix
    if p is None or q.dtype == torch.float32:
        return {}
    (batch, rows, q_heads, head_dim), kv_heads = q.shape, p.sizes.Hk
    length = p.sizes.L + rows
    page_size = p.k_cache.shape[1] if p.block_table is not None else 16
    pages = math.ceil(length / page_size)
    k, v = (x.view(-1, page_size, kv_heads, head_dim) for x in (p.k_cache, p.v_cache))
    table = p.block_table
    if table is None:  # a contiguous cache is one whose pages lie in order
        table = torch.arange(len(k), dtype=torch.int32, device=q.device).view(batch, -1)
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    last = torch.full_like(steps[1:], length - (pages - 1) * page_size)
    where = (steps * pages, table[:, :pages].flatten(), last)
    heads = (q_heads, kv_heads, head_dim, page_size)
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device)
    if rows == 1:
        name, kind = "flashinfer decode", flashinfer.BatchDecodeWithPagedKVCacheWrapper
        wrapper = kind(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*where, *heads, q_data_type=q.dtype)
    else:
        name = "flashinfer prefill"
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        mask = task.full_mask().expand(batch, -1, -1).flatten()
        wrapper.plan(steps * rows, *where, *heads, custom_mask=mask, q_data_type=q.dtype)
    return {name: lambda: {"out": wrapper.run(q.flatten(0, 1), (k, v)).view_as(q)}}


def merge(outs: torch.Tensor, lses: torch.Tensor) -> dict[str, Peer]:
    """Return FlashInfer's merge_state for two states; its log-sum-exp has base 2."""
    if len(outs) != 2 or needs("flashinfer", outs.device):
        return {}
    import flashinfer

    flat = [x.flatten(0, 1) for x in outs]
    bits = [(x * math.log2(math.e)).flatten(0, 1) for x in lses]

    def merged() -> dict[str, torch.Tensor]:
        out, lse = flashinfer.merge_state(flat[0], bits[0], flat[1], bits[1])
        return {"out": out.view_as(outs[0]), "lse": lse.view_as(lses[0]) * math.log(2)}

    return {"flashinfer merge_state": merged}


def xformers(task: Attention) -> dict[str, Peer]:
    """Return xFormers' tree attention on a contiguous cache: prefix and tree, then a merge."""
    q, p = task.q, task.prefix
    if p is None or p.block_table is not None or q.dtype == torch.float32:
        return {}
    name = next(module for module in XFORMERS if not needs(module, q.device))
    module = importlib.import_module(name)
    biases = importlib.import_module("xformers.ops.fmha.attn_bias")
    (batch, rows, q_heads, head_dim), kv_heads = q.shape, p.sizes.Hk
    group = q_heads // kv_heads

    def grouped(x: torch.Tensor) -> torch.Tensor:  # [B, M, Hk, D] -> [B, M, Hk, g, D]
        return x[:, :, :, None].expand(-1, -1, -1, group, -1)

    prefix_bias = biases.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[rows] * batch, kv_padding=p.k_cache.shape[1], kv_seqlen=[p.sizes.L] * batch
    )
    tree_bias = torch.zeros(rows, rows, dtype=q.dtype, device=q.device)
    tree_bias.masked_fill_(~task.tree_mask(), float("-inf"))

    def tree() -> dict[str, torch.Tensor]:
        keys = map(grouped, (p.k_tree, p.v_tree, p.k_cache, p.v_cache))
        rows_by_head = q.view(batch, rows, kv_heads, group, head_dim)
        out = module.tree_attention(rows_by_head, *keys, tree_bias, prefix_bias)
        return {"out": out.reshape(q.shape)}

    return {"xformers tree": tree}
