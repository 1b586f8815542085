"""The decode loop: draft, verify, accept, commit, for any number of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from specattn.acceptance import Accepted, accept, follow
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.sequences import Sequences
from specattn.decoding.statistics import RequestStatistics, Statistics, Stopwatch
from specattn.decoding.target import NOTHING, Target, Verification, Wanted, is_chain
from specattn.tree import Tree

CHUNK_SIZE = 2048
"""Prompt tokens per request and prefill pass: enough to keep a GPU busy, few enough for caches."""


class Draft(NamedTuple):
    """What a drafter proposes.

    Attributes
    ----------
    tree : Tree
        T nodes; node 0 is the root.
    tokens : Tensor, int64 [B, T]
        The root is the last committed token.
    probs : Tensor, float32 [B, T, V], or None
        Row n is the law that node n's children were sampled from; None if they were chosen
        deterministically. See `specattn.acceptance.accept`.
    """

    tree: Tree
    tokens: torch.Tensor
    probs: torch.Tensor | None = None


class Verified(NamedTuple):
    """What a drafter learns from the verification of its draft.

    Attributes
    ----------
    draft : Draft
    accepted : Accepted
    prefix : Tensor, int32 [B]
        Tokens that the cache held during the pass.
    result : Verification
        What the target said, and what the drafter wanted to know beside it.
    """

    draft: Draft
    accepted: Accepted
    prefix: torch.Tensor
    result: Verification


class Drafter:
    """A method at work on one batch of requests.

    Attributes
    ----------
    wanted : Wanted
        What the next verification shall hand out; may change from round to round.
    """

    wanted: Wanted = NOTHING

    def read(self, start: int, features: torch.Tensor) -> None:
        """Learn from a chunk of the prompts; called as `Target.prefill` calls ``on_features``."""

    def propose(self, root: torch.Tensor) -> Draft:
        """Draft a tree behind `root` [B], the last committed token of every request."""
        raise NotImplementedError

    def observe(self, verified: Verified) -> None:
        """Learn from a verification; the accepted path is already committed to the cache."""

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows of the batch alone, in this order."""

    def details(self) -> dict[str, Any]:
        """Return what this method has to say of its run beside the figures that all have."""
        return {}


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter,
    law: TargetLaw,
    sequences: Sequences,
    *,
    chunk_size: int = CHUNK_SIZE,
    generator: torch.Generator | None = None,
    on_tokens: Callable[[int, list[int]], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Statistics:
    """Continue every row of `sequences` until its stopping criteria say so.

    The last token of a prompt is not prefilled: it is the root of the first tree, so the first
    round is a round like all others. Per round the host waits once for the device, for the tokens
    that were accepted.

    Parameters
    ----------
    target : Target
        Attached, its cache empty.
    drafter : Drafter
    law : TargetLaw
    sequences : Sequences
        Prompts; receives the new tokens.
    chunk_size : int
        Prompt tokens per request and prefill pass.
    generator : torch.Generator, optional
        Source of randomness for acceptance.
    on_tokens, on_prefill : callable, optional
        As in `specattn.decoding.generate`.

    Returns
    -------
    Statistics
    """
    prompts = [sequences.prompt(row) for row in range(len(sequences.lengths))]
    requests = [RequestStatistics(len(prompt)) for prompt in prompts]
    watch = Stopwatch(target.device)
    target.prefill([prompt[:-1] for prompt in prompts], chunk_size, on_prefill, drafter.read)
    root = torch.stack([prompt[-1] for prompt in prompts]).to(target.device)
    watch.lap("prefill_seconds")

    while sequences.active:
        draft = drafter.propose(root)
        watch.lap("draft_seconds")

        prefix = target.cache.seqlens
        result = target.verify(draft.tree, draft.tokens, wanted=drafter.wanted)
        watch.lap("target_seconds")

        accepted = _accept(draft, law, result.logits, generator)
        target.cache.commit(accepted.nodes, accepted.counts, in_place=is_chain(draft.tree))
        finished = []
        for row, tokens in zip(sequences.active, _emitted(draft, accepted), strict=True):
            kept, done = sequences.extend(row, tokens)
            finished.append(done)
            requests[row].record(
                drafted=draft.tree.size - 1,
                depth=draft.tree.max_depth,
                accepted=len(tokens) - 1,
                emitted=len(kept),
            )
            if on_tokens is not None:
                on_tokens(row, kept)
        watch.lap("accept_seconds")

        drafter.observe(Verified(draft, accepted, prefix, result))
        root = accepted.next_token
        if any(finished):
            rows = target.cache.retire(finished)
            sequences.active = [sequences.active[row] for row in rows]
            root = root[rows]
            drafter.keep(rows)
        watch.lap("draft_seconds")

    return Statistics(requests, details=drafter.details(), **watch.totals())


def _accept(
    draft: Draft, law: TargetLaw, logits: torch.Tensor, generator: torch.Generator | None
) -> Accepted:
    """Decide which drafted tokens survive, and draw the token after them."""
    if draft.probs is None:

        def sample_at(node: torch.Tensor, emitted: torch.Tensor) -> torch.Tensor:
            said = logits.gather(1, node[:, None, None].expand(-1, 1, logits.shape[-1]))
            return law.next_token(said[:, 0], emitted, generator)

        return follow(draft.tree, draft.tokens, sample_at)
    probs = law.scores(logits, draft.tree, draft.tokens).softmax(-1)
    return accept(draft.tree, draft.tokens, probs, draft_probs=draft.probs, generator=generator)


def _emitted(draft: Draft, accepted: Accepted) -> list[list[int]]:
    """Return each request's new tokens: the accepted path, then the bonus token. Waits for them."""
    path = draft.tokens.gather(1, accepted.nodes.clamp_min(0))
    tokens = torch.cat([path, accepted.next_token[:, None]], 1)
    tokens.scatter_(1, accepted.counts[:, None], accepted.next_token[:, None])
    report = torch.cat([accepted.counts[:, None], tokens], 1).tolist()
    return [tokens[: count + 1] for count, *tokens in report]
