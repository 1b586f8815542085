"""Selections of all layers at once, and what they must be: by the reference, row by row."""

import itertools
import random

import torch

from specattn import reference

OPTIONS = [
    {"ratio": 0.07},
    {"ratio": 1.0},
    {"ratio": 0.3, "min_tokens": 5, "keep_first": 2, "keep_last": 3},
    {"budget": 1},
    {"budget": 9, "keep_first": 40},
    {"budget": 2000},
]


def scores_at_random(seed, layers, lengths, heads=None, width=64):
    """Return scores [layers, B, (heads,) width] with ties, and a row of nothing but -inf."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = layers, len(lengths), *([] if heads is None else [heads]), width
    levels = choose.choice((0, 3, 1000))
    scores = torch.randint(-levels, levels + 1, shape, generator=generator).float() / 7
    odd = torch.rand(shape, generator=generator)
    scores = scores.masked_fill(odd < 0.1, -torch.inf).masked_fill(odd > 0.95, torch.nan)
    scores[-1, 0] = -torch.inf
    for request, length in enumerate(lengths):
        scores[:, request, ..., length:] = torch.nan  # nobody reads it
    return scores


def expected_table(scores, prefix, newer, options):
    """Return positions [layers, B, .., K + newer] and how many are chosen [B, ..]."""
    layers, batch = scores.shape[:2]
    chosen, counts = reference.select_topk(scores.flatten(0, 1), prefix.repeat(layers), **options)
    table = torch.empty(*chosen.shape[:-1], chosen.shape[-1] + newer, dtype=torch.int32)
    for row in itertools.product(*map(range, chosen.shape[:-1])):
        count, first = int(counts[row]), int(prefix[row[0] % batch])
        behind = range(first, first + table.shape[-1] - count)
        table[row] = torch.tensor([*chosen[row][:count].tolist(), *behind], dtype=torch.int32)
    return table.unflatten(0, (layers, batch)), counts[:batch]
