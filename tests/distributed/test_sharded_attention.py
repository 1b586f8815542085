"""Recorded passes over a sharded cache against the model's own modules in float64 on one rank."""

import torch

from specattn.decoding.engine.target import Target
from specattn.decoding.passes.attention import CaptureSpec
from specattn.decoding.ranks.lockstep import Lockstep
from specattn.distributed import ContextParallel
from specattn.tree import Tree
from tests import covering
from tests.decoding.models import is_recorded, prompts, tiny_model

PROMPT, BLOCK, CAPACITY = 41, 4, 80
TREES = {"chain": Tree.chain(4), "tree": Tree([-1, 0, 0, 1, 1, 2]), "root": Tree.chain(0)}
PATH = torch.tensor([[1, 4]])  # of the tree


@torch.no_grad()
def verified(family, name, dtype, kv_dtype, ranks=None):
    """Return logits and scores of two passes, the second behind a path of the first."""
    model, tree = tiny_model(family).to(dtype), TREES[name]
    (prompt,) = prompts([PROMPT])
    lockstep = ranks and Lockstep.of(model, ranks)
    target = Target(model, 1, CAPACITY, lockstep=lockstep, kv_dtype=kv_dtype)
    assert is_recorded(target) == (dtype == torch.float32)
    target.prefill([prompt], 16)
    found, tokens = [], prompts([tree.size])[0][None]
    for shift in (0, 1):
        passed = target.verify(tree, tokens + shift, capture=CaptureSpec(rows=(0, -1)))
        scores = target.cache.gathered(passed.scores)[..., : target.cache.seqlens]
        found += [passed.logits.clone(), scores.clone()]
        path = PATH if name == "tree" else torch.arange(1, tree.size)[None]
        kept = torch.tensor([path.shape[1]])
        target.cache.commit(path, kept, in_place=name != "tree")
    return found


def verified_by_ranks(family, name, kv_dtype):
    return verified(family, name, torch.float32, kv_dtype, ContextParallel(block_size=BLOCK))


@covering.pairs("family, name, kv_dtype", ["qwen3-sliding", "gemma2"], [*TREES], [None, "int8"])
def test_recorded_passes_of_two_ranks_are_the_models_own(two_ranks, family, name, kv_dtype):
    expected = verified(family, name, torch.float64, kv_dtype)
    for found in two_ranks(verified_by_ranks, family, name, kv_dtype):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs.float(), atol=2e-5, rtol=1e-4)
