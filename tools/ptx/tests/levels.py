"""The best children of a tree's nodes in the emulator."""

import torch
from specattn.triton_kernels.children import best_children, children, expand_best
from tests.beams import check_best, check_children, check_expanded, make_level

from ..launch import emulated
from ..machine import Options

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Requests, nodes, vocabulary, dtype, children, the first node's number, whether rows lie apart.
LEVELS = {
    "ten of parts": (1, 3, 2500, BF16, 10, 61, False),
    "one part, float32": (2, 2, 129, FP32, 16, 5, False),
    "strided, one child": (2, 4, 1025, FP16, 1, 0, True),
}
ORDERS = (Options(), Options(warps=1, blocks=1, count=False))


def check_level(sizes, arch, orders=ORDERS, **options):
    """Find children, the best of them, and what is expanded; right, or AssertionError."""
    *sizes, width, first, strided = sizes
    level = make_level(*sizes, strided=strided, words=2)
    logits, scores, masks = level
    for order in orders:
        with emulated(arch, order) as launches:
            of_nodes = children(logits, scores, width, **options)
            best = best_children(*level, first, width, **options)
            expanded = expand_best(*of_nodes, masks, first, width, **options)
        assert len(launches) == 2 + 3 + 1
        check_children(logits, scores, of_nodes)
        check_best(*level, first, best)
        check_expanded(*of_nodes, masks, first, width, expanded)


def check_ties(arch):
    """Of equal ones the lower node wins, then the lower token."""
    row = (torch.arange(1100) % 3).bfloat16()
    logits, masks = row.expand(1, 2, 1100).contiguous(), torch.zeros(1, 2, 1, dtype=torch.int64)
    with emulated(arch, Options(count=False)):
        tokens, _, parents, _ = best_children(logits, torch.zeros(1, 2), masks, 0, 12)
    order = row.repeat(2).float().argsort(dim=0, descending=True, stable=True)[:12]
    assert torch.equal(parents[0] * 1100 + tokens[0], order)
