"""What a method is made of: the context that it is given, its drafter, what the two exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specattn.acceptance import Accepted
from specattn.decoding.engine.target import Target
from specattn.decoding.passes.attention import NO_CAPTURE, CaptureSpec
from specattn.decoding.passes.runner import Verification
from specattn.decoding.text.sampling import Sampler
from specattn.decoding.text.sequences import Sequences
from specattn.tree import Tree


@dataclass(frozen=True)
class DraftContext:
    """What a drafter works with during one run.

    Attributes
    ----------
    target : Target
    sampler : Sampler
        The target's distribution, which sampled drafts should be shaped by too.
    sequences : Sequences
        The committed texts.
    generator : torch.Generator or None
        Source of what is drawn for the rejection rule; None is the device's own.
    calibrates : bool
        Whether all that may be drafted is timed at once (`specattn.decoding.calibrate`).
    """

    target: Target
    sampler: Sampler
    sequences: Sequences
    generator: torch.Generator | None = None
    calibrates: bool = False


class Draft(NamedTuple):
    """What a drafter proposes.

    Attributes
    ----------
    tree : Tree
        T nodes; node 0 is the root.
    tokens : Tensor, int64 [B, T]
        The root is the last committed token. Those of padding are looked up and have no effect.
    probs : Tensor, float32 [B, T, V], or None
        Row n is the distribution that node n's children were sampled from; None if they were
        chosen deterministically. See `specattn.acceptance.accept`.
    drafters : sequence of str, or None
        The name of who drafted for each request, where several take turns; None: the method itself.
    """

    tree: Tree
    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    drafters: Sequence[str] | None = None

    def checked(self, requests: int, room: int) -> Draft:
        """Return a draft for so many requests, the tokens of each side by side.

        `room` is how many nodes the cache has room for. ValueError: tree and tokens do not fit
        together, or one of these.
        """
        tree, tokens = self.tree, self.tokens
        if tree.batch_size not in (None, requests):
            raise ValueError(f"draft: {tree.batch_size} trees were drafted for {requests} requests")
        shape, dtype = tuple(tokens.shape), tokens.dtype
        if shape != (requests, tree.size) or dtype != torch.int64:
            raise ValueError(
                f"draft: expected tokens [B = {requests}, T = {tree.size}] of int64 for its tree, "
                f"got {list(shape)} of {dtype}"
            )
        if tree.size > room:
            raise ValueError(
                f"draft: the tree has {tree.size} nodes, and the cache has room for {room}: the "
                "method's max_nodes must be those of its largest tree"
            )
        return self if tokens.stride(1) == 1 else self._replace(tokens=tokens.contiguous())


class Verified(NamedTuple):
    """What a drafter learns from the verification of a draft.

    Attributes
    ----------
    draft : Draft
    accepted : Accepted
    prefix : Tensor, int32 [B]
        Tokens that the cache held during the pass.
    result : Verification
        Logits and features of the target, and what was captured beside them. They hold until the
        target's next pass.
    counts : sequence of int
        How many nodes each request accepted, on the host.
    own : bool
        Whether the drafter has proposed this draft, for all requests. False where drafters take
        turns and it was another's, if only for one request of the batch.
    """

    draft: Draft
    accepted: Accepted
    prefix: torch.Tensor
    result: Verification
    counts: Sequence[int]
    own: bool = True


class Drafter:
    """A method at work on one batch of requests.

    Attributes
    ----------
    capture : CaptureSpec
        What the next verification hands out; may change from round to round.
    own_cache_bytes : int
        What its cache takes, if that is none of those that `Target.recall` knows.
    """

    capture: CaptureSpec = NO_CAPTURE
    own_cache_bytes: int = 0

    def on_prefill(self, start: int, features: Sequence[torch.Tensor]) -> None:
        """Learn from a chunk of the prompts; called as `Target.prefill` calls ``on_features``."""

    def propose(self, root: torch.Tensor) -> Draft:
        """Draft a tree behind `root` [B], the last committed token of every request."""
        raise NotImplementedError

    def on_accepted(self, draft: Draft, accepted: Accepted, result: Verification) -> None:
        """Enqueue what `observe` is to read on the host: the report of the round comes behind it.

        So the host waits once, for both.
        """

    def observe(self, verified: Verified) -> None:
        """Learn from a verification; the accepted path is already committed to the cache.

        Where several drafters take turns it may be that of another's draft: see `Verified.own`.
        """

    def compact(self, rows: list[int]) -> None:
        """Drop all rows of the batch but these, and keep them in this order."""

    def details(self) -> dict[str, Any]:
        """Return figures of the run that only this method has."""
        return {}
