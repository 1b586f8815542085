"""The launches that `offline` compiles: cases of every kernel, on tensors without memory."""

import itertools
from functools import partial

import torch
import triton
from specattn.triton_kernels.add_gumbel_noise import add_gumbel_noise
from specattn.triton_kernels.causal_conv_commit import causal_conv_commit
from specattn.triton_kernels.causal_conv_tree import causal_conv_tree
from specattn.triton_kernels.draw import draw_and_walk
from specattn.triton_kernels.gated_delta_commit import gated_delta_commit
from specattn.triton_kernels.gated_delta_tree import gated_delta_tree
from specattn.triton_kernels.hybrid_tree_attention import hybrid_tree_attention
from specattn.triton_kernels.importance_scores import importance_scores
from specattn.triton_kernels.linear_few_rows import linear_few_rows, linear_parts
from specattn.triton_kernels.merge_state import merge_state
from specattn.triton_kernels.move_path import move_path
from specattn.triton_kernels.select_topk import select_topk
from specattn.triton_kernels.sparse_gather_attention import sparse_gather_attention
from specattn.triton_kernels.tree_attention import tree_attention
from specattn.triton_kernels.verify_attention import verify_attention
from specattn.triton_kernels.write_kv import write_kv

from . import offline_steps

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
B, HK, GROUP, N, K = 2, 8, 4, 32768, 2304


def meta(*shape, dtype):
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def attention(
    rows, D, dtype, *,
    op="hybrid", page_size=0, window=None, softcap=0.0, chain=False, ragged=False, everything=False,
    trimmed=False, stored=None, scales="tokens", v_dim=None, heads=HK, v_in_k=False, per_row=False,
):  # fmt: skip
    """Call one attention primitive on meta tensors; `rows` query rows share a KV head.

    `ragged` requests have up to so many; `everything` lets lists of -1 stand for a whole prefix;
    the mask may be `trimmed` to the window already, with depths. A cache may be `stored` in 8 bits,
    with scales of its "tokens", its "heads", or "none". Values have `v_dim` columns, and where they
    are `v_in_k` are what keys of as many `heads` begin with. With lists `per_row` the `rows` are
    the heads of a group.
    """
    T, group, v_dim = max(rows // GROUP, 1), GROUP, v_dim or D
    if per_row:
        T, group = GROUP, rows
    real, ints = partial(meta, dtype=dtype), partial(meta, dtype=torch.int32)
    of_rows = (B * T,) if ragged else (B, T)
    row_sizes = (ints(B + 1), T) if ragged else (None, None)
    out, lse = real(*of_rows, heads * group, v_dim), meta(*of_rows, heads * group, dtype=FP32)
    q, k_tree = real(*of_rows, heads * group, D), real(*of_rows, heads, D)

    def values(keys):
        return keys[..., :v_dim] if v_in_k else keys.new_empty((*keys.shape[:-1], v_dim))

    v_tree = values(k_tree)
    mask = None if chain else meta(*of_rows, 1, dtype=torch.int64)
    tokens, table = (B, N, heads), None
    if page_size:
        tokens, table = (B * N // page_size, page_size, heads), ints(B, N // page_size)
    cache = meta(*tokens, D, dtype=stored or dtype)
    scale_shape = {"tokens": tokens, "heads": (heads,)}.get(scales) if stored else None
    scale = meta(*scale_shape, dtype=torch.float32) if scale_shape else None
    if op == "tree":
        tree_attention(q, k_tree, v_tree, mask, 0.1, softcap, out, lse)
        return
    prefix = (q, cache, values(cache))
    if op == "gather":
        lists = of_rows if per_row else (B, heads)
        chosen = (ints(*lists, K), ints(*lists))
        tree = (k_tree, v_tree, mask, table)
        options = (0.1, softcap, None, ints(B) if everything else None, *row_sizes, scale, scale)
        sparse_gather_attention(*prefix, *chosen, *tree, *options, per_row, out, lse)
        return
    depths = ints(*of_rows) if trimmed else None
    tree = (None, None) if op == "in_cache" else (k_tree, v_tree)
    options = (table, window, 0.1, softcap, None, *row_sizes, scale, scale)
    inputs = (*prefix, ints(B), *tree, mask, depths, *options)
    if op == "scores":
        collected = meta(B, heads, N, dtype=torch.float32)
        verify_attention(*inputs, op, (0, -1), True, out, lse, collected)
    elif op == "logits":
        collected = meta(B, 2, heads * GROUP, N, dtype=torch.bfloat16)
        verify_attention(*inputs, op, (0, -1), True, out, lse, collected)
    else:
        hybrid_tree_attention(*inputs, out, lse)


def merge(D, dtype):
    """Merge two states."""
    state = meta(B, 16, HK * GROUP, D, dtype=dtype), meta(B, 16, HK * GROUP, dtype=torch.float32)
    merge_state(*state, *state, *state)


def importance(D, dtype, stored=None):
    """Score a paged cache, or one of 8 bits with scales of its tokens."""
    ints = partial(meta, dtype=torch.int32)
    q, scores = meta(B, 16, HK * GROUP, D, dtype=dtype), meta(B, HK, N, dtype=torch.float32)
    cache, table = meta(B * N // 16, 16, HK, D, dtype=stored or dtype), ints(B, N // 16)
    scale = meta(B * N // 16, 16, HK, dtype=torch.float32) if stored else None
    importance_scores(q, cache, ints(B), True, table, 0.1, scale, scores)


def select(width):
    """Select from as many scores per head."""
    scores, lengths = meta(B, HK, width, dtype=torch.float32), meta(B, dtype=torch.int32)
    chosen = meta(B, HK, K, dtype=torch.int32), meta(B, HK, dtype=torch.int32)
    select_topk(scores, lengths, 0.07, None, 0, 4, 64, *chosen)


def gumbel():
    """Add noise to the logits of a draft."""
    places = meta(16, dtype=torch.int64)
    out = meta(16, 151936, dtype=torch.float32)
    add_gumbel_noise(meta(16, 151936, dtype=torch.bfloat16), 2**40, places, places, out)


def round_of(nodes, seed, dtype):
    """Draw behind the nodes of trees and walk; move a path in 32 layers."""
    ints, depth = partial(meta, dtype=torch.int64), 8
    logits, tokens = meta(B, nodes, 151936, dtype=dtype), ints(B, nodes)
    levels, warmth = meta(B, nodes, dtype=torch.int32), meta(B, dtype=torch.float32)
    path, report = ints(B, depth), ints(B, 4 + depth)
    draw_and_walk(logits, tokens, tokens, levels, warmth, ints(2, B), seed, path, report)
    cache = meta(32, 2, B, 1024, HK, 128, dtype=dtype)
    move_path(cache, path, report[:, 2], meta(B, dtype=torch.int32))


def write(D, dtype, cache_dtype, heads_first=False, dynamic=False, keys_alone=False):
    """Write a paged cache, [pages, page_size, Hk, D] or [pages, Hk, page_size, D]."""
    new, slots = meta(1, 16, HK, D, dtype=dtype), meta(1, 16, dtype=torch.int64)
    cache = meta(N // 16, 16, HK, D, dtype=cache_dtype)
    if heads_first:
        cache = meta(N // 16, HK, 16, D, dtype=cache_dtype).transpose(1, 2)
    scale = meta(N // 16, 16, HK, dtype=torch.float32) if dynamic else None
    values = (None, None) if keys_alone else (new, cache)
    write_kv(new, values[0], cache, values[1], slots, None, None, scale, scale)


def gated_delta(rows, k_dim, v_dim, dtype):
    """Verify a tree in a layer with a state, normalised, and commit a path of it."""
    real, single = partial(meta, B, rows, dtype=dtype), partial(meta, dtype=torch.float32)
    q, v, gate = real(HK, k_dim), real(2 * HK, v_dim), single(B, rows, 2 * HK)
    state = single(B, 2 * HK, k_dim, v_dim)
    stash = single(B, rows, 2 * HK, k_dim + v_dim + 1)
    parents, counts = meta(1, rows, dtype=torch.int64), meta(B, dtype=torch.int64)
    nodes = meta(B, rows, dtype=torch.int64)
    written = torch.empty_like(v), stash
    gated_delta_tree(q, q, v, gate, gate, state, parents, 0.1, True, None, None, *written)
    gated_delta_commit(state, stash, nodes, counts, None, None)


def causal_conv(rows, taps, dtype):
    """Convolve a tree's rows, and commit a path of it."""
    channels = 2 * HK * GROUP * 128
    x, kept = (meta(B, size, channels, dtype=dtype) for size in (rows, taps - 1))
    weight, bias = meta(channels, taps, dtype=dtype), meta(channels, dtype=dtype)
    parents, counts = meta(1, rows, dtype=torch.int64), meta(B, dtype=torch.int64)
    nodes, out = meta(B, rows, dtype=torch.int64), torch.empty_like(x)
    causal_conv_tree(x, weight, bias, kept, parents, "silu", None, None, out)
    causal_conv_commit(kept, x, nodes, counts, None, None)


def linear(rows, outputs, depth, dtype, gated=False, activation=None, added=False):
    """Multiply with a layer; one that is added to has a bias too."""
    x, weight, out = (
        meta(*size, dtype=dtype) for size in ((rows, depth), (outputs, depth), (rows, outputs))
    )
    bias, residual = (meta(outputs, dtype=dtype), out) if added else (None, None)
    up = weight if gated else None
    linear_few_rows(x, weight, bias, up, activation, residual, *[None] * 4, out)


def codes(rows, outputs, depth, dtype, bits, group, zeros=False, gated=False):
    """Multiply with codes, in groups or with one scale of a row, as a GPU's layers have them."""
    packed = (outputs, 64 * triton.cdiv(depth, 128)) if bits == 4 else (outputs, depth)
    kind = {8: torch.int8, 4: torch.uint8, "e4m3": torch.float8_e4m3fn}[bits]
    groups = triton.cdiv(depth, group) if group else 1
    weight, scale = meta(*packed, dtype=kind), meta(groups, outputs, dtype=dtype).t()
    zero = meta(groups, outputs, dtype=kind).t() if zeros else None
    beside = (weight, scale, zero) if gated else (None, None, None)
    x, out = meta(rows, depth, dtype=dtype), meta(rows, outputs, dtype=dtype)
    plain = x, weight, None, beside[0], "silu" if gated else None, None if gated else out
    linear_few_rows(*plain, scale, zero, *beside[1:], out)


def codes_of_heads(rows, depth, dtype, bits, group, zeros):
    """Multiply with the codes of queries, keys and values, side by side."""
    packed = depth if bits == 8 else 64 * triton.cdiv(depth, 128)
    kind, parts, sizes = {8: torch.int8, 4: torch.uint8}[bits], [], (4096, 1024, 1024)
    for size in sizes:
        scale = meta(depth // group, size, dtype=dtype).t()
        zero = meta(depth // group, size, dtype=kind).t() if zeros else None
        parts.append((meta(size, packed, dtype=kind), meta(size, dtype=dtype), scale, zero))
    x, out = meta(rows, depth, dtype=dtype), meta(rows, sum(sizes), dtype=dtype)
    linear_parts(x, parts, None, out)


VARIANTS = {
    "hybrid": {},
    "hybrid chain": {"chain": True},
    "hybrid in cache": {"op": "in_cache", "page_size": 16},
    "hybrid in cache window": {"op": "in_cache", "page_size": 16, "window": 1024},
    "hybrid paged": {"page_size": 16},
    "hybrid paged window softcap": {"page_size": 16, "window": 1024, "softcap": 20.0},
    "gather": {"op": "gather"},
    "gather paged": {"op": "gather", "page_size": 16},
    "scores": {"op": "scores"},
    "scores paged window": {"op": "scores", "page_size": 16, "window": 1024},
    "logits": {"op": "logits"},
    "logits all": {"op": "logits", "page_size": 16, "window": 1024, "softcap": 20.0},
    "logits trimmed": {"op": "logits", "window": 1024, "trimmed": True},
    "tree": {"op": "tree"},
}
VARIANTS |= {
    f"ragged {name}": {**VARIANTS[name], "ragged": True} for name in VARIANTS if name != "tree"
}
VARIANTS["ragged hybrid chain window"] = {"chain": True, "window": 1024, "ragged": True}
VARIANTS["logits chain"] = {**VARIANTS["logits all"], "chain": True}
VARIANTS["ragged gather all paged"] = {**VARIANTS["ragged gather paged"], "everything": True}
VARIANTS["gather all"] = {"op": "gather", "everything": True}
VARIANTS["gather rows"] = {**VARIANTS["gather"], "per_row": True}
VARIANTS["ragged gather rows all paged"] = {**VARIANTS["ragged gather all paged"], "per_row": True}
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
VARIANTS |= {
    "hybrid int8": {"stored": INT8},
    "hybrid e4m3": {"stored": E4M3, "scales": "heads"},
    "hybrid e5m2": {"stored": E5M2},
    "hybrid in cache window e4m3": {**VARIANTS["hybrid in cache window"], "stored": E4M3},
    "hybrid chain e4m3": {"chain": True, "stored": E4M3},
    "gather paged int8": {**VARIANTS["gather paged"], "stored": INT8},
    "scores paged window e4m3": {**VARIANTS["scores paged window"], "stored": E4M3},
    "logits all int8": {**VARIANTS["logits all"], "stored": INT8},
    "ragged hybrid e4m3": {"ragged": True, "stored": E4M3},
    "ragged logits all e5m2": {**VARIANTS["ragged logits all"], "stored": E5M2},
}
LATENT = {"v_dim": 512, "heads": 1, "v_in_k": True}
LATENTS = {
    f"latents {name}": VARIANTS[name] | LATENT
    for name in (
        *("hybrid", "hybrid in cache", "hybrid paged window softcap", "gather paged"),
        *("scores paged window", "logits all", "tree", "ragged hybrid"),
    )
}
LATENTS["latents hybrid chain"] = {"chain": True, **LATENT}
LATENTS["latents gather rows paged"] = {**LATENTS["latents gather paged"], "per_row": True}
OWN_VALUES = {
    "own values": {"v_dim": 128},
    "own values logits all": {**VARIANTS["logits all"], "v_dim": 128},
    "own latents": {"v_dim": 512, "heads": 1},
    "own latents int8": {"v_dim": 512, "heads": 1, "stored": INT8},
}
VARIANTS |= LATENTS | OWN_VALUES
QUICK = [("hybrid", 16, 128, BF16)]
# One or two variants of each primitive.
FEW = [
    *QUICK,
    ("hybrid", 64, 128, BF16),
    ("gather paged", 16, 128, BF16),
    ("scores paged window", 16, 128, BF16),
    ("logits all", 64, 128, BF16),
    ("tree", 64, 96, BF16),
    ("ragged hybrid", 16, 128, BF16),
    ("hybrid int8", 16, 128, BF16),
    ("latents hybrid", 32, 576, BF16),
]
# Every feature once, the heaviest at the largest tiles.
CHOSEN = [
    *FEW,
    ("hybrid", 128, 128, BF16),
    ("hybrid", 32, 80, FP16),
    ("hybrid", 16, 128, FP32),
    ("hybrid", 16, 256, FP32),
    ("scores paged window", 16, 256, FP32),
    ("hybrid in cache", 32, 128, BF16),
    ("gather", 64, 64, BF16),
    ("gather paged", 64, 128, BF16),
    ("scores paged window", 64, 128, BF16),
    ("logits all", 64, 256, BF16),
    ("ragged hybrid", 16, 128, FP32),
    ("ragged hybrid chain window", 64, 128, BF16),
    ("ragged gather all paged", 64, 128, BF16),
    ("ragged scores paged window", 64, 128, BF16),
    ("ragged logits all", 64, 128, BF16),
    ("ragged gather all paged", 128, 128, BF16),
    ("ragged gather rows all paged", 8, 128, BF16),
    ("ragged logits all", 128, 128, BF16),
    ("ragged logits all", 64, 256, BF16),
    ("hybrid chain", 512, 128, BF16),
    ("logits chain", 512, 128, BF16),
    ("hybrid paged window softcap", 16, 256, BF16),
    ("ragged scores paged window", 32, 256, BF16),
    ("hybrid e4m3", 64, 128, BF16),
    ("hybrid e5m2", 16, 128, FP16),
    ("hybrid in cache window e4m3", 32, 128, BF16),
    ("scores paged window e4m3", 16, 128, BF16),
    ("logits all int8", 64, 128, BF16),
    ("gather paged int8", 16, 80, BF16),
    ("latents hybrid", 16, 576, BF16),
    ("latents gather paged", 32, 576, BF16),
    ("latents gather rows paged", 128, 576, BF16),
    ("latents logits all", 32, 576, BF16),
    ("latents scores paged window", 16, 576, BF16),
    ("own values", 64, 192, BF16),
    ("own latents int8", 32, 576, BF16),
]


def _sizes(name):
    """Return (rows, D, dtype) of every configuration that a variant may take."""
    if name in LATENTS or VARIANTS[name].get("v_dim") == 512:
        return [(rows, 576, dtype) for dtype in (BF16, FP16) for rows in (16, 32)]
    if name in OWN_VALUES:
        return [(rows, D, BF16) for rows in (16, 32, 64, 128) for D in (64, 192, 256)]
    sizes = [(rows, D, BF16) for rows in (16, 32, 64, 128) for D in (64, 80, 96, 128, 256)]
    sizes += [(rows, D, FP16) for rows in (16, 64) for D in (128, 256)]
    sizes += [(16, D, FP32) for D in (64, 80, 96, 128, 256)]
    if VARIANTS[name].get("chain"):  # prompts
        sizes += [(512, D, dtype) for D in (64, 80, 128, 256) for dtype in (BF16, FP32)]
    return sizes


def calls(which):
    """Yield (name, call) for the cases to compile: a list's name, "small" or a variant's name."""
    chosen = {"quick": QUICK, "few": FEW, "chosen": CHOSEN, "small": []}.get(which)
    if chosen is None:
        chosen = [(which, *size) for size in _sizes(which)]
    for name, rows, D, dtype in chosen:
        label = f"{name}, {rows} rows, D {D}, {TYPES[dtype]}"
        yield label, partial(attention, rows, D, dtype, **VARIANTS[name])
    if which in VARIANTS:
        return
    for D in (64, 80, 128, 256) if which == "small" else (128,):
        yield f"merge, D {D}, bf16", partial(merge, D, BF16)
        yield f"importance paged, D {D}, bf16", partial(importance, D, BF16)
    yield "importance of e4m3, D 128, bf16", partial(importance, 128, BF16, E4M3)
    yield "write e4m3, D 128, bf16", partial(write, 128, BF16, E4M3, dynamic=True)
    for width in (4096, 16384, N):
        yield f"select of {width}", partial(select, width)
    yield "gumbel", gumbel
    yield "round of a tree, bf16", partial(round_of, 60, 2**40, BF16)
    yield "greedy round of a large tree, fp32", partial(round_of, 500, None, FP32)
    yield "write, D 128, bf16", partial(write, 128, BF16, BF16)
    yield "write latents, bf16", partial(write, 576, BF16, BF16, keys_alone=True)
    sizes = [(16, 128, 128), (64, 256, 256)]
    if which == "small":
        sizes += [(rows, D, D) for rows in (16, 32, 64) for D in (64, 128, 256)]
    for rows, k_dim, v_dim in sizes:
        label = f"gated delta, {rows} rows, D {k_dim} and {v_dim}, bf16"
        yield label, partial(gated_delta, rows, k_dim, v_dim, BF16)
    for rows in (16, 64):
        yield f"convolution, {rows} rows, bf16", partial(causal_conv, rows, 4, BF16)
    yield from linear_calls(which)
    yield from offline_steps.calls(which)
    yield "write heads first, D 80, fp32 to fp16", partial(write, 80, FP32, FP16, True)


def linear_calls(which):
    """Yield (name, call) of layers: gate and up, and such that no tile divides."""
    rows_of, dtypes, layers = (16, 64), (BF16,), [(14336, 4096, True, "silu", False)]
    if which in ("chosen", "small"):
        rows_of, dtypes = (16, 32, 64), (BF16, FP32)
        layers += [(4096, 14336, False, None, True), (1000, 1001, True, "gelu", True)]
    if which == "small":
        layers += [(50257, 896, True, "gelu", True), (896, 4096, False, None, False)]
    for (outputs, depth, *options), rows, dtype in itertools.product(layers, rows_of, dtypes):
        label = f"linear {outputs} x {depth}, {rows} rows, {TYPES[dtype]}"
        yield label, partial(linear, rows, outputs, depth, dtype, *options)
    forms = [(64, False, True)]
    if which in ("chosen", "small"):
        forms += [(32, True, False), (128, True, True), (None, False, False)]
    for (group, *options), rows, bits, dtype in itertools.product(forms, rows_of, (4, 8), dtypes):
        name = f"codes of {bits} bits, groups of {group}, {rows} rows, {TYPES[dtype]}"
        yield name, partial(codes, rows, 14336, 4096, dtype, bits, group, *options)
    for rows, dtype in itertools.product(rows_of, dtypes):
        name = f"floats of 8 bits, {rows} rows, {TYPES[dtype]}"
        yield name, partial(codes, rows, 14336, 4096, dtype, "e4m3", 128, gated=True)
    for rows, bits in itertools.product(rows_of, (4, 8)):
        name = f"codes of {bits} bits, heads, {rows} rows"
        yield name, partial(codes_of_heads, rows, 4096, BF16, bits, 64, bits == 4)
    if which in ("chosen", "small"):
        for rows, bits in itertools.product(rows_of, (4, 8)):
            name = f"codes of {bits} bits, no multiples, {rows} rows"
            yield name, partial(codes, rows, 1000, 1001, FP16, bits, None, True, True)
        for rows in rows_of:
            name = f"floats of 8 bits, no multiples, {rows} rows"
            yield name, partial(codes, rows, 1000, 1001, FP16, "e4m3", 128, gated=True)
