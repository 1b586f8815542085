"""Targets whose acceptance is simulated: drawn from a profile, or read from a written text.

Drafting, selection, acceptance and commit are the package's own, which knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from specattn.decoding import Target
from specattn.decoding.passes.attention import NO_CAPTURE, CaptureSpec
from specattn.decoding.passes.runner import Verification
from specattn.planning import AcceptanceProfile
from specattn.tree import Tree

MARK = "SIMULATED ACCEPTANCE"
REFERENCE_NOTE = f"{MARK} reference text"
CERTAIN = 1e4  # above any logit at any temperature of use, and exp(-1e4) is 0


class SimulatedTarget(Target):
    """A target for weights that mean nothing: it agrees with drafts as a profile says.

    Every pass runs as the real one does; then the logits of a verification are bent so that the
    drafted path survives to a depth that was drawn from the profile. Its prefill leaves random
    numbers: of the prompts only the length and the last token matter. The seed is that of
    acceptance.
    """

    def __init__(self, *given: Any, profile: AcceptanceProfile, seed: int):
        super().__init__(*given)
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


class ReferenceTarget(Target):
    """A target whose greedy text is given for every request, for requests beyond the model.

    The model reads the prompt, then the reference in one pass, and no draft. A verification looks
    up what was read: at the nodes whose path is the reference so far, the reference's next token
    stands above all others, and the ranks below it are the model's own. Behind a token that is not
    the reference's, the ranks are those that the model gave when this token was last read in the
    reference, so that a drafter which keeps ranks by token learns nothing new from it.

    `references` are B Tensors, int64 [n], what follows each prompt, all of one length; no more is
    decoded. `agreement` is the share of their tokens that the model itself ranked first.
    """

    def __init__(self, *given: Any, references: Sequence[torch.Tensor]):
        super().__init__(*given)
        self.references = torch.stack(list(references))
        self.start: list[int] = []
        self.agreement = 0.0

    def verify(
        self, tree: Tree, tokens: torch.Tensor, *, capture: CaptureSpec = NO_CAPTURE, **others: Any
    ) -> Verification:
        """Return what the model said of the reference, that on top; refuses more than logits."""
        if capture != NO_CAPTURE:
            raise ValueError("a reference has logits, but neither scores nor queries")
        if not self.start:
            self._read(tokens[:, 0])
        logits = self.logits.new_zeros(*tokens.shape, self.logits.shape[-1])
        parents = tree.parent_lists * (len(tokens) if len(tree.parent_lists) == 1 else 1)
        committed = self.cache.seqlens.tolist()
        for request, row in enumerate(tokens.tolist()):
            place = committed[request] - self.start[request]
            reference = self.references[request].tolist()
            met = {token: at + 1 for at, token in enumerate(reference[:place])}
            for node, token in enumerate(row):
                if token in met and met[token] < len(reference):
                    logits[request, node] = self.logits[request, met[token]]
            for node, depth in on_reference(parents[request], row, reference[place:]):
                logits[request, node] = self.logits[request, place + depth]
                logits[request, node, reference[place + depth]] = CERTAIN
        return Verification(logits, logits.new_empty(*tokens.shape, 0))

    def _read(self, roots: torch.Tensor) -> None:
        """Read the references behind the roots, which are the prompts' last tokens."""
        references = self.references.to(roots.device)
        read = torch.cat([roots[:, None], references[:, :-1]], 1)
        self.logits = super().verify(Tree.chain(read.shape[1] - 1), read).logits.clone()
        self.start = self.cache.seqlens.tolist()
        self.agreement = (self.logits.argmax(-1) == references).double().mean().item()


def on_reference(
    parents: Sequence[int], tokens: Sequence[int], expected: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the nodes, with depths, whose path from the root (node 0) is the reference."""
    depths = {0: 0}
    for node in range(1, len(parents)):
        depth = depths.get(parents[node])
        if depth is not None and depth < len(expected) and tokens[node] == expected[depth]:
            depths[node] = depth + 1
    return [(node, depth) for node, depth in depths.items() if depth < len(expected)]
