"""Attention to a text and to a path behind each of its tokens, as PosS' training needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_LN_2 = math.log(2)
_ROWS = 64  # queries of a block: what no later row sees is left out of its products
_CACHED_LOGITS, _MANY_LOGITS = 2**19, 2**25  # of a block: on a CPU as many as its cache holds

_Part = tuple[slice, slice, slice]


def path_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_path: torch.Tensor, v_path: torch.Tensor
) -> torch.Tensor:
    """Attend from row t, [B, L, Hq, D], to the text up to t, and to keys that are row t's alone.

    So a draft behind every token of a text sees what it would see at inference: the text, causal,
    and its own earlier tokens (HASS' harmonized context alignment; a hidden key weighs nothing).
    `k` and `v` are the text's, [B, L, Hk, D]; those of paths are [B, L, S, Hk, D], S may be 0.
    Weights exist for a block of rows at a time, and the gradient makes them again.
    """
    # The query heads of a KV head lie beside each other: one matrix, so no key is repeated.
    q = (q * (q.shape[-1] ** -0.5 / _LN_2)).unflatten(2, (k.shape[2], -1)).transpose(1, 2)
    k, v = (x.transpose(1, 2) for x in (k, v))
    k_path, v_path = (x.permute(0, 3, 1, 2, 4) for x in (k_path, v_path))
    out = _PathAttention.apply(*(x.contiguous() for x in (q, k, v, k_path, v_path)))
    return out.transpose(1, 2).flatten(2, 3)


def along_paths(
    seen: Sequence[tuple[torch.Tensor, torch.Tensor]], roots: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the attention of a depth: over the text's keys, then over those of its own path.

    `seen` are keys and values [B, L, Hk, D] of pairs at every depth up to this one, of which the
    first `roots` rows count.
    """
    (k, v), *path = ([x[:, :roots] for x in one] for one in seen)
    if path:
        k_path, v_path = (torch.stack(x, 2) for x in zip(*path, strict=True))
    else:
        k_path, v_path = (x[:, :, None][:, :, :0] for x in (k, v))
    return lambda q: path_attention(q, k, v, k_path, v_path)


class _PathAttention(torch.autograd.Function):
    """Softmax and gradient per block, as flash attention's: from each row's log-sum-exp.

    Of q [B, Hk, L, g, D], scaled, k and v [B, Hk, L, D], and the paths' [B, Hk, L, S, D]. Logits
    are to base 2: torch's `exp` is many times slower on a CPU where its result is 0, `exp2` is not.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        q, k, v, k_path, v_path = inputs
        out, lse = torch.empty_like(q), torch.empty_like(q[..., :1], dtype=_wide(q))
        for rows, keys in _blocks(q):
            text, path = _logits(q[rows], k[keys], k_path[rows])
            top = torch.cat([text.amax(-1, keepdim=True), path], -1).amax(-1, keepdim=True)
            text, path = text.sub_(top).exp2_(), path.sub_(top).exp2_()
            total = text.sum(-1, keepdim=True) + path.sum(-1, keepdim=True)
            mixed = (_matrix(text.to(q.dtype)) @ v[keys]).view_as(q[rows])
            out[rows] = (mixed + path.to(q.dtype) @ v_path[rows]) / total
            lse[rows] = top + total.log2()
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, k_path, v_path, out, lse = ctx.saved_tensors
        dq, dk_path, dv_path = (torch.empty_like(x) for x in (q, k_path, v_path))
        dk, dv = (torch.zeros_like(x, dtype=_wide(x)) for x in (k, v))
        slope = slope.contiguous()
        mean = (slope * out).sum(-1, keepdim=True, dtype=lse.dtype)
        for rows, keys in _blocks(q):
            text, path = _logits(q[rows], k[keys], k_path[rows])
            text, path = (x.sub_(lse[rows]).exp2_() for x in (text, path))
            dv[keys] += _matrix(text.to(q.dtype)).mT @ _matrix(slope[rows])
            dv_path[rows] = path.to(q.dtype).mT @ slope[rows]
            # A softmax's gradient: each weight times what it gains over the mean.
            gain = (_matrix(slope[rows]) @ v[keys].mT).view_as(text) - mean[rows]
            dtext = _matrix(text.mul_(gain).to(q.dtype))
            dpath = path.mul_(slope[rows] @ v_path[rows].mT - mean[rows]).to(q.dtype)
            dk[keys] += dtext.mT @ _matrix(q[rows])
            dk_path[rows] = dpath.mT @ q[rows]
            dq[rows] = (dtext @ k[keys]).view_as(q[rows]) + dpath @ k_path[rows]
        dq, dk, dk_path = (x.mul_(_LN_2) for x in (dq, dk, dk_path))
        return dq, dk.to(k.dtype), dv.to(v.dtype), dk_path, dv_path


def _logits(
    q: torch.Tensor, k: torch.Tensor, k_path: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a block's logits over the text and over its paths, [b, Hk, R, g, keys] each."""
    count = q.shape[2]
    text = (_matrix(q) @ k.mT).to(_wide(q)).unflatten(2, (count, -1))
    later = torch.full((count, count), -torch.inf, dtype=text.dtype, device=q.device).triu(1)
    text[..., -count:] += later[:, None]
    return text, (q @ k_path.mT).to(_wide(q))


def _blocks(q: torch.Tensor) -> Iterator[tuple[_Part, _Part]]:
    """Yield where the rows of each block are, and the keys that they see."""
    batch, heads, length, groups, _ = q.shape
    rows = min(_ROWS, length)
    logits = _CACHED_LOGITS if q.device.type == "cpu" else _MANY_LOGITS
    step = max(1, logits // (heads * groups * rows * length))
    for first in range(0, batch, step):
        requests = slice(first, first + step), slice(None)
        for start in range(0, length, rows):
            end = min(start + rows, length)
            yield (*requests, slice(start, end)), (*requests, slice(end))


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of all heads of a group as one matrix: [b, Hk, R * g, C]."""
    return x.flatten(2, 3)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
