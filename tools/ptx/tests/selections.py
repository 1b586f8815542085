"""`select_topk` in the emulator: shapes, ties and options at random, one tile and several."""

import random
from unittest import mock

import torch

import specattn
from specattn import reference

# The module, whose name its function has too.
from specattn.backends.backend import function_named

from ..launch import emulated
from ..machine import Options


def problem(seed):
    """Return (scores, lengths, options) of a seed."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, capacity = choose.randint(1, 3), choose.choice((1, 7, 64, 257, 900))
    heads = choose.choice((None, 1, 3))
    shape = (batch, capacity) if heads is None else (batch, heads, capacity)
    levels = choose.choice((1, 3, 10**6))
    scores = torch.randint(-levels, levels + 1, shape, generator=generator).float() / 7
    odd = torch.rand(shape, generator=generator)
    scores = scores.masked_fill(odd < 0.1, -torch.inf).masked_fill(odd > 0.95, torch.inf)
    lengths = torch.tensor([choose.randint(0, capacity) for _ in range(batch)], dtype=torch.int32)
    size = choose.choice(({"ratio": 0.07}, {"ratio": 1.0}, {"budget": 9}, {"budget": 2000}))
    floors = {"min_tokens": choose.choice((0, 5)), "keep_first": choose.choice((0, 2, 40))}
    return scores, lengths, size | floors | {"keep_last": choose.choice((0, 3))}


def check(arch, seeds):
    """Select in two orders, held in registers and in tiles; equality, or AssertionError."""
    module = function_named("select_topk", "triton_kernels").__globals__
    orders = (Options(count=False), Options(warps=1, blocks=seeds[0], count=False))
    for seed in seeds:
        scores, lengths, options = problem(seed)
        expected = reference.select_topk(scores, lengths, **options)
        for tiles, order in zip(({1024: 4}, {}), orders, strict=True):
            patched = {"_TILES": tiles, "_LOOPED": (256, 4)}
            with mock.patch.dict(module, patched), emulated(arch, order):
                actual = specattn.select_topk(scores, lengths, **options)
            for x, y in zip(actual, expected, strict=True):
                assert torch.equal(x, y), (seed, tiles)


def check_cuda(arch, seeds):
    """Select with the CUDA kernel, keys held and read again; equality, or AssertionError."""
    from specattn.backends.cuda import selection

    from ..cuda_launch import emulated_cuda

    orders = (Options(count=False), Options(warps=1, blocks=seeds[0], count=False))
    for seed in seeds:
        scores, lengths, options = problem(seed)
        expected = reference.select_topk(scores, lengths, **options)
        for static, order in zip((selection._STATIC, 2**30), orders, strict=True):
            with mock.patch.object(selection, "_STATIC", static), emulated_cuda(arch, order):
                actual = specattn.select_topk(scores, lengths, **options)
            for x, y in zip(actual, expected, strict=True):
                assert torch.equal(x, y), (seed, static)
