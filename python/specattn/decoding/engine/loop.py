"""The decode loop: prefill, then rounds of draft, verify, accept and commit, for any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch

from specattn.blocks import graph_bytes
from specattn.decoding.engine.contract import DraftContext, Drafter, Verified
from specattn.decoding.engine.target import Target
from specattn.decoding.text.draws import moved
from specattn.decoding.text.rounds import Round, pass_times
from specattn.decoding.text.statistics import RequestStatistics, Statistics, Stopwatch

CHUNK_SIZE = 2048
"""Prompt tokens per request and prefill pass: enough to keep a GPU busy, few enough for caches."""

OnRound = Callable[[int, Round], None]
OnPrefill = Callable[[int, int], None]


@torch.no_grad()
def decode(
    context: DraftContext,
    drafter: Drafter,
    *,
    chunk_size: int = CHUNK_SIZE,
    on_round: OnRound | None = None,
    on_prefill: OnPrefill | None = None,
) -> Statistics:
    """Prefill the prompts of ``context.sequences``, then run rounds until every row has ended.

    Parameters
    ----------
    context : DraftContext
        The cache of its target is empty.
    drafter : Drafter
    chunk_size : int
        Prompt tokens per request and prefill pass.
    on_round, on_prefill : callable, optional
        As in `specattn.decoding.generate`.

    Returns
    -------
    Statistics
    """
    watch = Stopwatch(context.target.device)
    prompts = context.sequences.prompts
    prefill(context.target, prompts, chunk_size, on_prefill, drafter.on_prefill)
    watch.lap("prefill_seconds")
    return run_rounds(context, drafter, watch, on_round)


def prefill(
    target: Target,
    prompts: list[torch.Tensor],
    chunk_size: int = CHUNK_SIZE,
    on_prefill: OnPrefill | None = None,
    on_features: Callable[[int, Sequence[torch.Tensor]], None] | None = None,
) -> None:
    """Prefill all tokens of each prompt but the last.

    The last token is the root of the first tree, so the first round is a round like all others.
    """
    target.prefill([prompt[:-1] for prompt in prompts], chunk_size, on_prefill, on_features)


@torch.no_grad()
def run_rounds(
    context: DraftContext,
    drafter: Drafter,
    watch: Stopwatch,
    on_round: OnRound | None = None,
) -> Statistics:
    """Continue every row of ``context.sequences`` until its stopping criteria end it.

    The cache holds the prompts but their last tokens, and the drafter has seen the prefill. What
    `watch` has measured so far is part of the statistics. Per round the host waits once for the
    device, for the tokens that were accepted, and by then the commit is enqueued.
    """
    target, sequences = context.target, context.sequences
    requests = [RequestStatistics(len(prompt)) for prompt in sequences.prompts]
    cache_bytes = target.cache.nbytes  # before requests leave it
    taking_turns = False
    root = moved(torch.stack([prompt[-1] for prompt in sequences.prompts]), target.device)

    while sequences.active:
        room = target.cache.capacity - max(sequences.active_lengths) + 1  # the root is not cached
        draft = drafter.propose(root).checked(len(sequences.active), room)
        watch.lap("draft_seconds")

        prefix = target.cache.seqlens
        result = target.verify(
            draft.tree, draft.tokens, capture=drafter.capture, reuse_buffers=True
        )
        watch.lap("target_seconds")

        accepted, report = context.sampler.accept(
            draft.tree, draft.tokens, result.logits, draft.probs, context.generator
        )
        drafter.on_accepted(draft, accepted, result)
        report.send()  # behind it what no drafter reads before the next round
        counts, in_place = report.counts, draft.tree.is_chain
        target.cache.commit(accepted.nodes, accepted.counts, in_place=in_place, on_host=counts)
        outcomes = report.read()  # a GPU is at work on the commit meanwhile
        finished, taking_turns = [], draft.drafters is not None
        names = draft.drafters or repeat(None, len(outcomes))
        for row, name, outcome in zip(sequences.active, names, outcomes, strict=True):
            drafted, depth, tokens = outcome
            if tokens[-1] < 0:
                position = len(sequences.text(row)) + len(tokens) - 1
                raise ValueError(
                    f"request {row}: no token can follow at position {position}: its processed "
                    "logits are all -inf, or one is NaN"
                )
            kept, done = sequences.extend(row, tokens)
            finished.append(done)
            target.check_read(sequences.length(row) - int(done), f"request {row}")
            emitted = Round(drafted, depth, len(tokens) - 1, kept, name if drafted else None)
            requests[row].record(emitted)
            if on_round is not None:
                on_round(row, emitted)
        watch.lap("accept_seconds")

        if counts is None:
            counts = [len(outcome.tokens) - 1 for outcome in outcomes]
        drafter.observe(Verified(draft, accepted, prefix, result, counts))
        root = accepted.next_token
        if any(finished):
            rows = target.cache.retire(finished)
            sequences.active = [sequences.active[row] for row in rows]
            root = root[rows]
            drafter.compact(rows)
        watch.lap("draft_seconds")

    seconds: dict[str, Any] = watch.totals()
    found = Statistics(requests, **seconds)
    found.times, found.cache_bytes = pass_times(watch.seconds()), cache_bytes
    found.graph_bytes = graph_bytes(target.device)
    found.details = {**(found.by_drafter("") if taking_turns else {}), **drafter.details()}
    return found
