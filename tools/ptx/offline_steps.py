"""The small kernels beside a layer's products, as `offline` compiles them."""

from functools import partial

import torch
from specattn.triton_kernels.children import best_children
from specattn.triton_kernels.rms_norm import add_norm, gate, rms_norm
from specattn.triton_kernels.rotate_heads import rotate_heads

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
meta = partial(torch.empty, device="meta")


def heads_of(D, dtype, *, half=None, heads=(32, 8), normed=False, stored=None, rows=8):
    """Turn and store a layer's heads; scales of 8 bits lie at the ends of rows."""
    q_heads, kv_heads = heads
    norm = (meta(D, dtype=dtype), 1e-6) if normed else None
    tables = [meta(4096, half or D // 2, dtype=FP32)] * 2
    place = *tables, meta(1, dtype=INT32), meta(1, rows, dtype=INT32)
    row = D if stored is None else D + 16
    cache = meta(1, 4096, kv_heads, row, dtype=stored or dtype)[..., :D]
    scale = None if stored is None else meta(1, 4096, kv_heads, row // 4, dtype=FP32)[..., -1]
    x = meta(1, rows, q_heads + 2 * kv_heads, D, dtype=dtype)
    store = (cache, cache), None, (scale, scale)
    rotate_heads(x, q_heads, (norm, norm), place, store)


def norms(width, dtype):
    """Norm rows, and add normed ones."""
    x, weight = meta(1, 8, width, dtype=dtype), meta(width, dtype=dtype)
    rms_norm(x, weight, 1e-6)
    add_norm(x, x, 1.0, weight, 1e-6)


def gates(width, dtype, activation="silu"):
    """Gate the halves of rows."""
    gate(*meta(1, 8, 2 * width, dtype=dtype).chunk(2, -1), activation)


def level(vocabulary, dtype, width=10):
    """Find the best children of a level of ten nodes."""
    masks, scores = meta(1, 10, 2, dtype=torch.int64), meta(1, 10, dtype=FP32)
    best_children(meta(1, 10, vocabulary, dtype=dtype), scores, masks, 11, width)


def calls(which):
    """Yield (name, call)."""
    yield "heads, D 128, bf16", partial(heads_of, 128, BF16)
    yield "heads normed, D 128, bf16", partial(heads_of, 128, BF16, normed=True)
    yield "norm of 4096, bf16", partial(norms, 4096, BF16)
    yield "gate of 14336, bf16", partial(gates, 14336, BF16)
    yield "level of 128256, bf16", partial(level, 128256, BF16)
    if which not in ("chosen", "small"):
        return
    int8, e4m3 = torch.int8, torch.float8_e4m3fn
    for D, half, dtype, stored in (
        (256, 128, BF16, None), (256, 128, FP32, e4m3), (96, 16, BF16, int8), (80, 40, FP32, None),
    ):  # fmt: skip
        given = {"half": half, "heads": (12, 4), "normed": True, "stored": stored}
        label = f"heads normed, D {D}, {dtype} to {stored}"
        yield label, partial(heads_of, D, dtype, **given)
    for width, dtype in ((16384, BF16), (5120, FP32), (128, BF16), (1001, FP32)):
        yield f"norm of {width}, {dtype}", partial(norms, width, dtype)
    yield "gate of 1001, fp32", partial(gates, 1001, FP32, "gelu")
    yield "level of 262144, 16 of each, fp32", partial(level, 262144, FP32, 16)
    yield "level of 151936, 33 of each, bf16", partial(level, 151936, BF16, 33)
