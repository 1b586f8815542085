"""Models attend by the primitives over transformers' caches, as exactly as by eager attention."""

import copy
from itertools import product

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.masking_utils import eager_mask

from specattn.integrations.transformers import Cache
from tests.decoding.models import OTHERS, tiny_model
from tests.integrations.transformers.models import FAMILIES, LEFT, eager, ours, padded

CACHES = {
    "dynamic": lambda model, _: DynamicCache(config=model.config),
    "static": lambda model, length: StaticCache(config=model.config, max_cache_len=length),
    "own": lambda model, _: Cache(model.config),
    "own-without-windows": lambda model, _: Cache(),
}

pytestmark = pytest.mark.filterwarnings(f"error:.*{LEFT}")


def exact(module, query, key, value, attention_mask, *, scaling, softcap=None, s_aux=None, **_):
    """Attend as on paper, in float64; a row that sees nothing gives 0."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~attention_mask, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.exp()[:, None, None]
    return (weights / total.where(total > 0, 1) @ value).transpose(1, 2), None


AttentionInterface.register("exact", exact)
AttentionMaskInterface.register("exact", lambda **options: eager_mask(**options) == 0)


@torch.no_grad()
def logits(model, ids, mask, cuts, cache):
    """Return the logits of a batch that is given in pieces, where it is not padded."""
    pieces, begin = [], 0
    for end in [*cuts, ids.shape[1]]:
        options = {"attention_mask": mask[:, :end], "past_key_values": cache}
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
        pieces.append(model(ids[:, begin:end], position_ids=positions, **options).logits)
        begin = end
    return torch.cat(pieces, 1)[mask.bool()]


def assert_as_exact_as_eager(model, found, *arguments):
    """Hold logits to those of float64, which eager attention in float32 misses too."""
    paper = copy.deepcopy(model).double()
    paper.set_attn_implementation("exact")
    paper.set_experts_implementation("eager")
    expected = logits(paper, *arguments, None)
    other = logits(eager(model), *arguments, None)
    allowed = 2 * (other - expected).abs().max()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=allowed.item())


BATCHES = {
    "one": ((40,), "left"),
    "left": ((40, 23, 31), "left"),
    "left-by-pages": ((97, 130, 120), "left"),
    "left-short-last": ((130, 97, 6), "left"),
    "right": ((40, 23, 31), "right"),
}


def cases():
    """Yield families with batches and caches: all of these in two families, one of each in all."""
    for family, (batch, padding), (cache, kind) in product(
        FAMILIES, *(tuple(enumerate(one)) for one in (BATCHES, CACHES))
    ):
        quick = family in ("qwen2-sliding", "gpt_oss") or (batch - cache) % len(CACHES) == 0
        marks = () if quick else pytest.mark.slow
        yield pytest.param(family, padding, kind, marks=marks)


@pytest.mark.parametrize(("family", "batch", "cache"), list(cases()))
def test_logits(family, batch, cache, poisoned_empty):
    model = tiny_model(family, num_hidden_layers=2 if family not in OTHERS else 4)
    ids, mask = padded(BATCHES[batch][0], side=BATCHES[batch][1])
    length = ids.shape[1]
    # A text that is padded behind may not go on: there would be a hole.
    cuts = () if batch == "right" else (length - 5, length - 2, length - 1)
    found = logits(ours(model), ids, mask, cuts, CACHES[cache](model, length + 3))
    assert_as_exact_as_eager(model, found, ids, mask, ())
