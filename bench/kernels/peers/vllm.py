"""vLLM's attention and gated delta rule for CPUs, over memory of its own; chains only.

Its schedule of a step, which all layers share, is not timed. Measured from `.venv-vllm`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable

import torch

from ..inputs import SCALE
from .task import Attention, Peer

_BLOCK = 128  # tokens, as its engine takes on a CPU
_STORED = {"chain, e4m3": "fp8_e4m3", "chain, e5m2": "fp8_e5m2"}


@functools.cache
def _operators():
    """Return vLLM's module of operators; it prints much and asks much of the system."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import _custom_ops

    return _custom_ops


def why_not(device: torch.device) -> str | None:
    """Return why it is no peer on this device, or None."""
    if device.type != "cpu":
        return "its kernel for CPUs runs on a CPU only"
    if importlib.util.find_spec("vllm") is None:
        return "not installed here: `make vllm`, then .venv-vllm/bin/python bench/run_kernels.py"
    _operators()
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        return "this build of vLLM is not for CPUs"
    return None


def attention(task: Attention) -> dict[str, Peer]:
    """Return its kernel where the tree is a chain behind a cache.

    It has one scale for all keys of 8 bits; what is stored times a power of two is exact there.
    """
    q = task.q
    if task.prefix is None or not task.chain or q.shape[-1] % 32:
        return {}
    kind = _STORED.get(task.stored, "auto")
    if task.stored and kind == "auto":
        return {}
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    ops = _operators()
    (batch, rows, q_heads, head_dim), (k, v) = q.shape, task.keys_and_values()
    length, kv_heads = k.shape[1:3]
    scales = (SCALE, SCALE, kind) if task.stored else ()
    try:
        isa = _get_attn_isa(q.dtype, _BLOCK, head_dim, kind)
    except NotImplementedError:  # caches of 8 bits without AVX-512
        return {}
    blocks = -(-length // _BLOCK)
    dtype = torch.uint8 if task.stored else q.dtype
    cache = torch.zeros(batch * blocks, kv_heads, 2 * _BLOCK, head_dim, dtype=dtype)
    k_cache, v_cache = cache.chunk(2, dim=2)
    slots = torch.arange(batch)[:, None] * blocks * _BLOCK + torch.arange(length)
    flat = (x.flatten(0, 1).contiguous() for x in (k, v))
    ops.cpu_attn_reshape_and_cache(*flat, k_cache, v_cache, slots.flatten(), isa, *scales)
    starts = torch.arange(batch + 1, dtype=torch.int32) * rows
    lengths = torch.full((batch,), length, dtype=torch.int32)
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        batch, q_heads, kv_heads, head_dim, lengths, q.dtype, starts, True, -1, isa, True,
        None, kind,
    )  # fmt: skip
    packed = q.flatten(0, 1)
    out = torch.empty_like(packed)

    def attend() -> dict[str, torch.Tensor]:
        ops.cpu_attention_with_kv_cache(
            packed, k_cache, v_cache, out, starts, lengths, head_dim**-0.5, True, None, -1,
            table, 0.0, schedule, None, None, *scales,
        )  # fmt: skip
        return {"out": out.view_as(q)}

    return {"vllm": attend}


def latents(q: torch.Tensor, cache: torch.Tensor, v_dim: int) -> dict[str, Peer]:
    """Return its attention over latents [B, keys, 1, D] where a request has few rows.

    It knows one row of a request: those of a chain are requests that share their blocks.
    """
    ops, block = _operators(), 16  # it has no other size of blocks
    (batch, rows, heads, D), length = q.shape, cache.shape[1]
    blocks = -(-length // block)
    pages = torch.zeros(batch, blocks * block, D, dtype=q.dtype)
    pages[:, :length] = cache[:, :, 0]
    pages = pages.view(batch * blocks, block, D)
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    table = table.repeat_interleave(rows, 0)
    lengths = torch.arange(length - rows + 1, length + 1, dtype=torch.int32).repeat(batch)
    queries, out = q.flatten(0, 1).contiguous(), q.new_empty(batch * rows, heads, v_dim)

    def attend() -> dict[str, torch.Tensor]:
        ops.mla_decode_kvcache_cpu(out, queries, pages, D**-0.5, table, lengths)
        return {"out": out.view(batch, rows, heads, v_dim)}

    return {"vllm": attend}


def snapshots(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return its verification of a chain, which keeps the state behind every row.

    Of rows q, k [T, Hk, D], v [T, Hv, D] and gates a, b [T, Hv]; it is called with states
    [T, Hv, D, D], of which it reads the first and writes all.
    """
    ops = _operators()
    rows, heads = a.shape
    rate, bias = torch.zeros(heads), torch.zeros(heads, dtype=a.dtype)
    slots, accepted = torch.arange(rows, dtype=torch.int32)[None], torch.ones(1, dtype=torch.int32)
    starts = torch.tensor([0, rows], dtype=torch.int32)

    def verify(states: torch.Tensor) -> torch.Tensor:
        return ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
            rate, bias, q, k, v, a, b, states, slots, accepted, starts, True
        )

    return verify
