"""Levels of a draft's tree, and what of them is best."""

import torch

from specattn.blocks import TORCH
from tests.cases import assert_accurate
from tests.cpu.tensors import apart, normal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LUCK = 3e-6  # what torch may hit in sums of a few numbers of size one


def make_level(batch, nodes, vocabulary, dtype, seed=0, *, strided=False, first=5, words=1):
    """Return logits, scores and masks of a level."""
    (logits,) = normal(seed, (batch * nodes, vocabulary), dtype=dtype)
    logits *= 2
    logits = (apart(logits) if strided else logits).unflatten(0, (batch, nodes))
    (scores,) = normal(seed, (batch, nodes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    masks = torch.randint(2**62, (batch, nodes, words), generator=generator)
    return logits, scores, masks >> 40 if words > 1 else masks & 1


def check_children(logits, scores, found):
    """Hold every node's children against float64, and their order against a stable sort."""
    tokens, paths = (x.cpu() for x in found)
    width = tokens.shape[-1]
    order = logits.float().argsort(dim=-1, descending=True, stable=True)[..., :width]
    assert torch.equal(tokens, order)
    exact, rough = (
        logits.to(to).log_softmax(-1).gather(-1, order) + scores.to(to)[..., None]
        for to in (torch.float64, torch.float32)
    )
    assert_accurate(paths, exact, rough, atol=LUCK)


def check_best(logits, scores, masks, first, found):
    """Hold a level's best children against the best of float64."""
    tokens, best, parents, below = (x.cpu() for x in found)
    batch, nodes, vocabulary = logits.shape
    width = tokens.shape[1]
    places = (parents - first) * vocabulary + tokens
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    assert ((parents >= first) & (parents < first + nodes)).all()
    assert all(len(row.unique()) == len(row) for row in places)
    assert (best[:, 1:] <= best[:, :-1]).all()
    exact, rough = (
        (logits.to(to).log_softmax(-1) + scores.to(to)[:, :, None]).flatten(1)
        for to in (torch.float64, torch.float32)
    )
    assert_accurate(best, exact.topk(width).values, rough.topk(width).values, atol=LUCK)
    assert_accurate(best, exact.gather(1, places), rough.gather(1, places), atol=LUCK)
    assert torch.equal(below, masks_below(masks, parents - first, first + nodes))


def masks_below(masks, parents, first):
    """Return what new nodes see: as their parents, and themselves."""
    below = masks.gather(1, parents[..., None].expand(*parents.shape, masks.shape[-1])).clone()
    for i in range(parents.shape[1]):
        word, bit = divmod(first + i, 64)
        below[:, i, word] |= torch.tensor(-(2**63) if bit == 63 else 1 << bit)
    return below


def check_expanded(tokens, scores, masks, first, width, found):
    """Hold chosen candidates against torch; of equal ones the first is chosen."""
    chosen, drafted, best, rows, below = (x.cpu() for x in found)
    order = scores.flatten(1).argsort(dim=1, descending=True, stable=True)[:, :width]
    assert torch.equal(chosen, order)
    _, *expected = TORCH.expand_best(tokens, scores, masks, first, width)
    parents = order // tokens.shape[2]
    assert torch.equal(drafted, tokens.flatten(1).gather(1, order))
    assert torch.equal(best, expected[1])
    assert torch.equal(rows, parents + torch.arange(len(rows))[:, None] * tokens.shape[1])
    assert torch.equal(below, masks_below(masks, parents, first))
