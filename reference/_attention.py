"""The mathematics that all primitives share: logits, softmax states, and how a cache is addressed.

A *softmax state* is a pair `(out, lse)`: the attention output over some set of keys, and the
natural log of the sum of their exponentiated logits. States over disjoint keys merge into the state
over their union (`merge_state`), and the state over no keys is `(0, -inf)`.
"""

from typing import NamedTuple

import torch

from ._eight_bits import dequantised

# Rows are taken in blocks of about so many logits, 4 MiB in float32, so that prefill fits in caches
# and memory; not fewer than 16 rows, so that keys are not read again for every few of them.
LOGITS_PER_BLOCK = 2**20
LEAST_ROWS_PER_BLOCK = 16


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits, softmax and sums: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def attend(q, k, v, visible, softmax_scale=None, softcap=0.0):
    """Return the state `(out [B, T, Hq, Dv], lse [B, T, Hq])` of q over the keys its rows see.

    q [B, T, Hq, D]; k [B, Hk, M, D]; v [B, Hk, M, Dv]; visible bool [B or 1, Hk or 1, T or 1, M].
    The state is in the accumulation dtype. Keys and values that a row does not see may be NaN or
    infinite: 0 * NaN is NaN, so logits are replaced, and values are added to those who see them.
    """
    batch, rows, q_heads, _ = q.shape
    dtype = accumulation_dtype(q.dtype)
    k, v = k.to(dtype), v.to(dtype)
    hidden = ~visible.all(2)[..., None] & ~v.isfinite()  # from some row
    odd = None if is_surely_false(hidden) else v.masked_fill(~hidden, 0)
    v = fill_where(hidden, v, 0)
    visible = visible.expand(-1, -1, rows, -1)
    step = LOGITS_PER_BLOCK // (batch * q_heads * max(1, k.shape[2]))
    step = max(LEAST_ROWS_PER_BLOCK, step)
    outs, lses = [], []
    for start in range(0, rows, step):
        block = slice(start, start + step)
        logits = scaled_logits(q[:, block], k, softmax_scale, softcap)
        out, lse = softmax_state(mask_logits(logits, visible[:, :, block]), v)
        if odd is not None:
            out = out + of_those_seen(odd, visible[:, :, block], q_heads)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def scaled_logits(q, k, softmax_scale=None, softcap=0.0):
    """Return the scaled, capped logits [B, Hk, T, g, M] of q [B, T, Hq, D] and k [B, Hk, M, D]."""
    batch, rows, q_heads, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    dtype = accumulation_dtype(q.dtype)
    softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    # The g heads of a group and all rows meet the same keys: one matrix product per KV head.
    grouped = q.to(dtype).unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)
    logits = (grouped * softmax_scale) @ k.to(dtype).transpose(-1, -2)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.view(batch, kv_heads, rows, q_heads // kv_heads, keys)


def mask_logits(logits, visible):
    """Return logits [B, Hk, T, g, M], -inf where visible [B or 1, Hk or 1, T or 1, M] denies."""
    return fill_where(~visible[:, :, :, None], logits, -torch.inf)


def softmax_state(logits, v):
    """Return the state `(out [B, T, Hq, Dv], lse [B, T, Hq])` of masked logits.

    v is [B, Hk, M, Dv].

    With `m = max logit` and `l = sum(exp(logit - m))`: `lse = m + log(l)` and
    `out = sum(exp(logit - m) v) / l`.
    """
    batch, kv_heads, rows, group, keys = logits.shape
    if keys == 0:
        out = v.new_zeros(batch, rows, kv_heads * group, v.shape[-1])
        return out, v.new_full(out.shape[:-1], -torch.inf)
    m = logits.amax(-1, keepdim=True)
    m = m.masked_fill(m.isneginf(), 0)  # no key at all: exp(-inf - 0) is 0, not NaN
    weights = (logits - m).exp_()
    l = weights.sum(-1, keepdim=True)
    lse = m + l.log()
    out = (weights.flatten(2, 3) @ v).unflatten(2, (rows, group))
    out = out / l.masked_fill(l == 0, 1)
    return out.transpose(1, 2).flatten(2, 3), lse.squeeze(-1).transpose(1, 2).flatten(2, 3)


def of_those_seen(odd, visible, q_heads):
    """Return [B, T, Hq, Dv]: 0, NaN or an infinity, by the odd values [B, Hk, M, Dv] a row sees."""
    seen, found = visible.to(odd.dtype), 0.0
    for value in (torch.nan, torch.inf, -torch.inf):
        here = odd.isnan() if value != value else odd == value
        met = seen @ here.to(odd.dtype) > 0
        found = found + torch.zeros_like(met, dtype=odd.dtype).masked_fill(met, value)
    return found.transpose(1, 2).repeat_interleave(q_heads // odd.shape[1], 2)


def fill_where(hidden, x, value):
    """Return x with `value` where `hidden`; x itself where a free check finds nothing hidden."""
    return x if is_surely_false(hidden) else x.masked_fill(hidden, value)


def is_surely_false(condition):
    """Return whether nothing holds a condition; on a GPU, where reading it would sync, False."""
    return not condition.is_cuda and not condition.any()


class Cache(NamedTuple):
    """Keys or values that are stored for all requests: contiguous, or with a table paged.

    `scale` is what the tokens of a cache of 8 bits are multiplied with, in `dtype`.
    """

    tokens: torch.Tensor
    block_table: torch.Tensor | None
    scale: torch.Tensor | None
    dtype: torch.dtype

    def read(self, how, *where):
        """Return the tokens that a function finds [.., Hk, n, D], as the numbers they mean."""
        tokens, scale = how(self.tokens, *where, self.block_table), self.scale
        if scale is not None:
            per_token = scale.dim() == 3
            scale = (
                how(scale[..., None], *where, self.block_table)[..., 0]
                if per_token
                else scale[:, None]
            )
        return dequantised(tokens, scale, self.dtype)


def caches_of(q, k_cache, v_cache, block_table=None, k_scale=None, v_scale=None):
    """Return the keys and values that queries `q` attend to."""
    dtype = accumulation_dtype(q.dtype)
    return [
        Cache(tokens, block_table, scale, dtype)
        for tokens, scale in ((k_cache, k_scale), (v_cache, v_scale))
    ]


def prefix_of(cache, cache_seqlens, block_table=None):
    """Return the logical prefix [B, Hk, n, D] of a contiguous or paged cache.

    On the CPU it ends at the longest live length, so that no dead capacity is converted.
    """
    if block_table is None:
        return cache[:, : longest(cache_seqlens, cache.shape[1])].transpose(1, 2)
    page_size = cache.shape[1]
    capacity = block_table.shape[1] * page_size
    columns = -(-longest(cache_seqlens, capacity) // page_size)
    first_token = torch.arange(columns, device=cache.device) * page_size
    held = first_token < cache_seqlens[:, None]  # table entries that name no page are never read
    pages = block_table[:, :columns].long().masked_fill(~held, 0)
    return cache[pages].flatten(1, 2).transpose(1, 2)


def capacity_of(cache, block_table=None):
    """Return N, the number of tokens that one request can hold."""
    return cache.shape[1] if block_table is None else block_table.shape[1] * cache.shape[1]


def tokens_at(cache, positions, live, block_table=None):
    """Return the tokens at logical positions: [B, M] or [B, Hk, M] -> [B, Hk, M, D].

    Neither a position that is not `live` nor its page is looked up; any token stands there instead.
    """
    row = torch.arange(positions.shape[0], device=cache.device)
    row = row.view(-1, *[1] * (positions.dim() - 1))
    positions = positions.long().masked_fill(~live, 0)
    if block_table is not None:
        page_size = cache.shape[1]
        row = block_table.long()[row, positions // page_size].masked_fill(~live, 0)
        positions = positions % page_size
    if positions.dim() == 2:
        return cache[row, positions].transpose(1, 2)
    return cache[row, positions, torch.arange(cache.shape[2], device=cache.device)[:, None]]


def longest(lengths, capacity):
    """Return the largest length on the CPU; the capacity on a GPU, where reading it would sync."""
    return capacity if lengths.is_cuda else int(lengths.max())
