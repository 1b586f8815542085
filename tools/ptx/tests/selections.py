"""`select_topk` in the emulator: shapes, ties and options at random, one tile and several."""

import itertools
import random
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import torch
from tests.selections import OPTIONS, expected_table, scores_at_random

import specattn
from specattn import reference

# The module, whose name its function has too.
from specattn.backends.backend import function_named
from specattn.blocks.fused import Fused

from ..launch import emulated
from ..machine import Machine, Options

# Together; one warp after the other, and blocks shuffled.
ORDERS = (Options(count=False), Options(warps=1, blocks=1, count=False))


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
    for seed in seeds:
        scores, lengths, options = problem(seed)
        expected = reference.select_topk(scores, lengths, **options)
        for tiles, order in zip(({1024: 4}, {}), ORDERS, strict=True):
            patched = {"_TILES": tiles, "_LOOPED": (256, 4)}
            with mock.patch.dict(module, patched), emulated(arch, order):
                actual = specattn.select_topk(scores, lengths, **options)
            for x, y in zip(actual, expected, strict=True):
                assert torch.equal(x, y), (seed, tiles)


def check_layers(arch, seeds):
    """Select in all layers at once, in two orders, one launch each; equality, or AssertionError."""
    for seed in seeds:
        choose = random.Random(seed)
        layers, batch, newer = choose.randint(1, 3), choose.randint(1, 3), choose.choice((0, 1, 12))
        width, options = choose.choice((7, 64, 900)), choose.choice(OPTIONS)
        lengths = [choose.randint(0, width) for _ in range(batch)]
        scores = scores_at_random(seed, layers, lengths, choose.choice((None, 1, 3)), width)
        prefix = torch.tensor(lengths, dtype=torch.int32)
        expected = expected_table(scores, prefix, newer, options)
        for order in (replace(order, given=True) for order in ORDERS):  # NaN is a value here
            with emulated(arch, order) as launches:
                found = Fused().select(scores, prefix, newer, **options)
            assert len(launches) == 1
            for x, y in zip(found, expected, strict=True):
                assert torch.equal(x, y), seed


def check_cuda(arch, seeds):
    """Select with the emulated CUDA kernels in two orders; equality, or AssertionError."""
    from ..cuda_launch import emulated_cuda

    for order in (Options(count=False), Options(warps=1, blocks=seeds[0], count=False)):
        check_rows_and_shares(lambda order=order: emulated_cuda(arch, order), seeds)


def check_rows_and_shares(serving, seeds):
    """Select with the CUDA kernels in what ``serving()`` enters, of whole rows and of shares."""
    for seed, shares in itertools.product(seeds, (nullcontext, small_shares)):
        scores, lengths, options = problem(seed)
        with shares(), serving():
            actual = specattn.select_topk(scores, lengths, **options)
        for x, y in zip(actual, reference.select_topk(scores, lengths, **options), strict=True):
            assert torch.equal(x, y), (seed, shares)


def longest_blocks(arch, length):
    """Return the most instructions of a block's warps, for each launch of one long selection."""
    from ..cuda_launch import emulated_cuda

    launches, wave = [], Machine._wave

    def counted(machine, ids):
        before = sum(machine.executed)
        wave(machine, ids)
        if not launches or launches[-1][0] is not machine:
            launches.append((machine, []))
        launches[-1][1].append(sum(machine.executed) - before)

    scores = torch.randn(1, length, generator=torch.Generator().manual_seed(0))
    call = scores, torch.tensor([length], dtype=torch.int32)
    one_by_one = emulated_cuda(arch, Options(wave=1, count=False))
    with mock.patch.object(Machine, "_wave", counted), one_by_one:
        actual = specattn.select_topk(*call, ratio=0.07)
    for x, y in zip(actual, reference.select_topk(*call, ratio=0.07), strict=True):
        assert torch.equal(x, y)
    return [max(blocks) for _, blocks in launches]


def small_shares():
    """Return a context in which the CUDA kernels cut all rows into shares of 64 scores."""
    from specattn.backends.cuda import selection

    return mock.patch.multiple(selection, _ALONE=0, _SHARE=64)


@contextmanager
def emulated_shares(*arguments, **forced):
    """Serve as `emulated_cuda` does, rows in shares."""
    from ..cuda_launch import emulated_cuda

    with small_shares(), emulated_cuda(*arguments, **forced) as launches:
        yield launches
