"""Acceptance drawn from a stated profile, for models whose weights mean nothing.

A `SimulatedTarget` runs every pass as the real one does and then bends the logits of a verification
so that the drafted path survives to a depth that was drawn from the profile. Drafting, selection,
acceptance and commit are the package's own, which knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.decoding import Target
from specattn.decoding.passes.runner import Verification
from specattn.planning import AcceptanceProfile
from specattn.tree import Tree

MARK = "SIMULATED ACCEPTANCE"
CERTAIN = 1e4  # above any logit at any temperature of use, and exp(-1e4) is 0


def note(profile: AcceptanceProfile) -> str:
    """Return what every line of output says."""
    return f"{MARK} {profile.name}"


class SimulatedTarget(Target):
    """A target whose prefill leaves random numbers, and which agrees with drafts as a profile says.

    Of the prompts only the length and the last token matter; the seed is that of acceptance.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        capacity: int,
        *,
        profile: AcceptanceProfile,
        seed: int,
    ):
        super().__init__(model, batch, capacity)
        self.profile = profile
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def verify(self, tree: Tree, tokens: torch.Tensor, **options: Any) -> Verification:
        """Verify as every target does, and bend the logits afterwards."""
        result = super().verify(tree, tokens, **options)
        bend(result.logits, tree, tokens, self.profile, self.generator)
        return result

    def prefill(
        self,
        prompts: Sequence[torch.Tensor],
        chunk_size: int,
        on_chunk: Callable[[int, int], None] | None = None,
        on_features: Callable[[int, Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        """Fill the cache with noise, and show noise as the features of every prompt."""
        self.cache.storage.normal_()
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        noise = torch.randn(1, 1, self.model.config.hidden_size, device=self.device)
        noise = noise.to(self.model.dtype)
        longest = int(lengths.max())
        for start in range(0, longest, chunk_size):
            rows = min(chunk_size, longest - start)
            self.cache.seqlens = lengths.clamp(max=start + rows).to(torch.int32)
            if on_features is not None:
                on_features(start, noise.expand(len(prompts), rows, -1).unbind())


def bend(
    logits: torch.Tensor,
    tree: Tree,
    tokens: torch.Tensor,
    profile: AcceptanceProfile,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return logits that accept one path of a depth drawn from the profile, and nothing below it.

    The logits [B, T, V] are changed in place. Siblings must carry different tokens [B, T], as they
    do in every tree that is worth verifying.
    """
    if not tree.max_depth:
        return logits
    batch = torch.arange(len(tokens), device=tokens.device)
    depths = tree.depths.expand(len(tokens), -1)
    last = _last_accepted(tree, depths, profile, generator)
    path = tree.paths.expand(len(tokens), -1, -1)[batch, last]
    for node, child in zip(path[:, :-1].unbind(1), path[:, 1:].unbind(1), strict=True):
        token = tokens.gather(1, child.clamp_min(0)[:, None])[:, 0]
        at = batch, node.clamp_min(0), token
        logits[at] = torch.where(child >= 0, CERTAIN, logits[at])
    below = depths == depths.gather(1, last[:, None]) + 1
    barred = torch.where(below, -torch.inf, torch.inf).to(logits.dtype)
    logits[batch, last] = logits[batch, last].scatter_reduce(1, tokens, barred, "amin")
    return logits


def _last_accepted(
    tree: Tree, depths: torch.Tensor, profile: AcceptanceProfile, generator: torch.Generator
) -> torch.Tensor:
    """Draw a depth for every request, then one of its nodes there: int64 [B]."""

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=depths.device, generator=generator)

    rates = torch.tensor([profile.rate(level + 1) for level in range(tree.max_depth)])
    survives = uniform(len(depths), tree.max_depth) < rates.to(depths.device)
    depth = survives.int().cumprod(1).sum(1, keepdim=True)
    # A tree that does not go as deep is accepted as deep as it goes.
    order = torch.where(depths <= depth, depths + uniform(*depths.shape), -1.0)
    return torch.where(tree.valid, order, -1.0).argmax(1)  # padding has depth 0, too
