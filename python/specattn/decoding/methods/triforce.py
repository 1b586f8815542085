"""TriForce: the target drafts on chunks of the prompt that were retrieved once.

What: chunks of `chunk_size` prompt tokens, for each KV head, by the product of their mean key
with the query of the prompt's last token (heads of a group averaged); the first chunk always; and
everything behind the prompt's last whole chunk. When: once, in the first round. (Sun et al.,
*TriForce: lossless acceleration of long sequence generation with hierarchical speculative
decoding*, 2024.)

The hierarchy puts a small model below: it drafts a few tokens on sinks and a recent window, the
target on its retrieved chunks (the *middle* level) judges them, and so on until a chain is as long
as the full target is to verify.

It is exact. Whatever the middle level keeps, an accepted guess, the residual's token behind a
rejected one, its own token behind the last, follows the middle distribution p given the chain so
far and everything drawn before: that is the theorem of speculative sampling, token for token. Where
a chain is cut, at `gamma`, does not depend on what is dropped. So the draft distribution q that the
full target tests each token against is the middle one at its place, and exactly its rows are kept.
(The authors' program draws from p itself behind a rejected guess, which favours what p and the
small model agree on.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from specattn.acceptance import accept, accept_samples
from specattn.decoding.drafting.budget import Budgeted
from specattn.decoding.drafting.chain import ChainBuilder
from specattn.decoding.drafting.gains import NONE, Effort
from specattn.decoding.drafting.sparse_chain import (
    PrefixSelection,
    SelectionDrafter,
    chunk_means,
    tokens_of,
)
from specattn.decoding.drafting.trained import remembered
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.engine.loop import prefill
from specattn.decoding.engine.target import Target
from specattn.decoding.methods.streaming import Streaming
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.decoding.model.families import has_states
from specattn.decoding.passes.attention import NO_CAPTURE, CaptureSpec, Selection
from specattn.ops import select_topk
from specattn.tree import Tree

SINKS = 16
"""First tokens that the small model always attends to."""


@dataclass(frozen=True)
class TriForce(Budgeted, name="triforce"):
    """Self-speculation on retrieved chunks, with a small model below it if there is one.

    Parameters
    ----------
    gamma : int or None
        Tokens that the full target verifies per round. None: as many as pay, up to 6, or none.
    ratio, budget, min_tokens
        As for `Budgeted`, of the prompt and rounded up to chunks.
    chunk_size : int
    draft : PreTrainedModel or path, optional
        A small model with the target's vocabulary, or the folder that holds one. A path is loaded
        once; a model is used as it is.
    draft_gamma : int
        Tokens that the small model drafts for each pass of the middle level.
    draft_budget : int
        Tokens that the small model attends to: the first and the last ones. It never sees more of
        the prompt, so its own cache grows with the new text alone.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: the small model's
        family is not supported, or it does not have the target's vocabulary. From both: it
        has layers that keep a state.
    """

    most_gamma: ClassVar[int] = 6

    chunk_size: int = 8
    draft: PreTrainedModel | Path | str | None = None
    draft_gamma: int = 1
    draft_budget: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(1, "chunk_size", "draft_gamma")
        if self.draft_budget <= SINKS:
            raise ValueError(f"draft_budget must be more than {SINKS}, got {self.draft_budget}")

    @property
    def max_nodes(self) -> int:
        """The root, `gamma` tokens, and what the middle level may judge in vain behind them."""
        return self.max_gamma + 1 + (self.draft_gamma if self.draft is not None else 0)

    def prepared(self, model: PreTrainedModel) -> TriForce:
        """Return this method with its small model loaded and found to fit `model`."""
        method, small = super().prepared(model), self.draft
        if small is None:
            return method
        if not isinstance(small, PreTrainedModel):
            if not Path(small).is_dir():
                raise ValueError(f"draft: {small} is not a folder")
            load = partial(load_causal_model, small, model.dtype, model.device)
            small = remembered(model, self.name, Path(small), load)
        if has_states(small.config):
            raise ValueError(
                f"triforce: draft is of type {small.config.model_type!r}; its layers keep states, "
                "and what the target rejects cannot be taken out of these"
            )
        theirs, ours = small.config.vocab_size, model.config.vocab_size
        if theirs != ours:
            raise ValueError(f"draft: a vocabulary of {theirs} tokens, the target's has {ours}")
        return replace(method, draft=small)

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter; its first round drafts nothing, because no query exists yet."""
        method = self.prepared(context.target.model)
        if method.draft is None or not context.target.full_layers:
            return _RetrievalDrafter(method, context)
        return _HierarchyDrafter(method, context)


class _RetrievalDrafter(SelectionDrafter):
    """Chains drafted by the target on the chunks that its first verification led to."""

    def __init__(self, method: TriForce, context: DraftContext):
        super().__init__(method, 0, context)
        self.method = method
        if self.target.full_layers:
            self.capture = CaptureSpec(queries=True)

    def select(self, verified: Verified) -> None:
        queries = verified.result.queries
        if queries is None:
            return
        self.selected = retrieve(self.method, self.target, queries[:, :, :1], verified.prefix)
        self.newer = self.target.cache.capacity - int(self.selected.prefix.min())
        self.capture = NO_CAPTURE


def retrieve(
    method: TriForce, target: Target, queries: torch.Tensor, prefix: torch.Tensor
) -> PrefixSelection:
    """Select chunks among the first `prefix` [B] cached tokens by `queries` [layers, B, 1, Hq, D].

    The mean of a chunk's logits is the logit of its mean key.
    """
    size, chunks = method.chunk_size, prefix // method.chunk_size
    found = []
    for layer, q in zip(target.full_layers, queries, strict=True):
        scores = target.cache.importance_scores(layer, q, prefix)
        best = select_topk(chunk_means(scores, size), chunks, **method.share(size), keep_first=1)
        found.append(tokens_of(*best, size))
    selection = Selection(torch.stack([one.indices for one in found]), found[0].lengths)
    return PrefixSelection(selection, chunks * size)


class _HierarchyDrafter(_RetrievalDrafter):
    """Chains drafted by a small model and judged by the target on its chunks, piece by piece.

    Every request's chain has its own length until all are long enough.
    """

    def __init__(self, method: TriForce, context: DraftContext):
        super().__init__(method, context)
        device, guesses = self.target.device, method.draft_gamma
        self.tree = Tree.chain(method.max_gamma + guesses + 1, device=device)
        self.piece = Tree.chain(guesses, device=device)
        self.rows = torch.arange(guesses + 1, device=device)
        self.small = _SmallModel(method, context, self.chain, self.tree)
        self.own_cache_bytes = self.small.target.cache.nbytes
        self.passes = torch.zeros((), dtype=torch.int64, device=device)
        self.kept = self.passes

    def attempt(self, root: torch.Tensor, effort: Effort) -> None:
        self.draft(root, effort)

    def draft(self, root: torch.Tensor, effort: Effort) -> Draft:
        self.small.begin()
        self.prepares = self.selected is None and effort != NONE
        steps = self.selectors(effort.depth) if effort.depth else []
        gamma = len(steps)
        tokens = pad(root[:, None], (0, self.tree.size - 1))
        ends, probs = torch.zeros_like(self.target.cache.seqlens), list[torch.Tensor]()
        while steps and int(ends.min()) < gamma:  # the host must know when it is enough
            guesses = self.small.guess(tokens, ends)
            tokens, after = self._judge(*guesses, ends, steps[0], probs, gamma)
            self.passes = self.passes + (ends < gamma).sum()
            self.kept = self.kept + (after - ends).sum()
            ends = after
        self.small.read_end(tokens, gamma)
        return self.chain.draft(tokens[:, : gamma + 1], [rows[:, :gamma] for rows in probs])

    def _judge(
        self,
        tokens: torch.Tensor,
        small_probs: list[torch.Tensor],
        ends: torch.Tensor,
        selection: Selection,
        probs: list[torch.Tensor],
        gamma: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the middle level judge the guesses behind the nodes `ends` [B] of the chains.

        Returns the chains with its own tokens in place of rejected guesses, and where they end now.
        Its distributions are put into the only entry of `probs`, row by row; rows that later pieces
        write again meant nothing yet.
        """
        sampler, generator = self.chain.sampler, self.chain.generator
        nodes = ends[:, None] + self.rows
        block = tokens.gather(1, nodes)
        logits = self.chain.model.draft(block, ends, selection.extended(ends)).logits
        if sampler.greedy or not self.method.rejection:
            drawn = sampler.draw(logits, self.tree, tokens, ends).clamp_min(0)
            accepted = accept_samples(self.piece, block, drawn)
        else:
            middle = sampler.scores(logits, self.tree, tokens, ends).float().softmax(-1)
            small = pad(torch.cat(small_probs, 1), (0, 0, 0, 1))
            accepted = accept(self.piece, block, middle, draft_probs=small, generator=generator)
            if not probs:
                probs.append(middle.new_zeros(len(tokens), self.tree.size, middle.shape[-1]))
            probs[0].scatter_(1, nodes[..., None].expand_as(middle), middle)
        after = ends + accepted.counts.int() + 1
        tokens = tokens.scatter(1, after[:, None].long(), accepted.next_token[:, None])
        return tokens, after.clamp(max=gamma)

    def observe(self, verified: Verified) -> None:
        super().observe(verified)
        self.small.commit(verified)

    def compact(self, rows: list[int]) -> None:
        super().compact(rows)
        self.small.compact(rows)

    def details(self) -> dict[str, Any]:
        """Return how far a pass of the middle level came."""
        passes = max(int(self.passes), 1)
        return {
            **super().details(),
            "tokens per pass of the middle level": int(self.kept) / passes,
        }


class _SmallModel:
    """A small model on a cache of its own, which attends to the first tokens and the last ones."""

    def __init__(self, method: TriForce, context: DraftContext, chain: ChainBuilder, tree: Tree):
        self.method, self.chain, self.tree = method, chain, tree
        sequences = context.sequences
        self.prompts = [self._shortened(prompt) for prompt in sequences.prompts]
        assert isinstance(method.draft, PreTrainedModel), "it is prepared"
        capacity = method.draft_budget + sequences.room
        longest = max(map(len, self.prompts)) + sequences.draft_depth
        self.target = Target(method.draft, len(self.prompts), capacity, longest=longest)
        self.rule = Streaming(gamma=tree.size, budget=method.draft_budget, sinks=SINKS)
        self.begun = False  # whether it has read a token of this round's chains

    def begin(self) -> None:
        """Begin a round; the first one reads the prompts."""
        if self.prompts:
            prefill(self.target, self.prompts, self.method.draft_budget)
            self.prompts = []
        cache = self.target.cache
        layers = len(self.target.full_layers)
        self.window = self.rule.steps(cache.seqlens, cache.capacity, layers)[0]
        self.begun = False

    def guess(
        self, tokens: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Draft behind the nodes `ends` [B]; return the chains, and what tokens were drawn from."""
        probs = list[torch.Tensor]()
        for step in range(self.method.draft_gamma):
            node = ends + step
            # Of a chain that the middle level went on with, two tokens may be new.
            logits = self._read(tokens, node, 2 if self.begun and step == 0 else 1)
            drawn = self.chain.draw(logits, self.tree, tokens, node, probs)
            tokens = tokens.scatter(1, (node + 1)[:, None].long(), drawn)
            self.begun = True
        return tokens, probs

    def read_end(self, tokens: torch.Tensor, gamma: int) -> None:
        """Read what has not been read of chains of `gamma` tokens behind the root."""
        self._read(tokens, torch.full_like(self.target.cache.seqlens, gamma), min(2, gamma + 1))

    def commit(self, verified: Verified) -> None:
        """Keep what the full target accepted."""
        self.target.cache.commit(*verified.accepted[:2], in_place=True)

    def compact(self, rows: list[int]) -> None:
        """Drop all rows of the batch but these."""
        batch = self.target.cache.batch_size
        self.target.cache.retire([row not in rows for row in range(batch)])

    def _read(self, tokens: torch.Tensor, node: torch.Tensor, count: int) -> torch.Tensor:
        """Read `count` tokens up to each chain's `node` [B]; return the last one's logits."""
        first = node - (count - 1)
        rows = first[:, None] + torch.arange(count, device=tokens.device)
        window = self.window.extended(first)
        return self.target.draft(tokens.gather(1, rows), first, window).logits[:, -1:]

    def _shortened(self, prompt: torch.Tensor) -> torch.Tensor:
        """Return the prompt's first and last tokens."""
        if len(prompt) <= self.method.draft_budget:
            return prompt
        last = self.method.draft_budget - SINKS
        return torch.cat([prompt[:SINKS], prompt[-last:]])
