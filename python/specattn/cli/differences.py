"""Where two texts part, and whether rounding explains it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from specattn.cli.session import Continuation, DecodingSession
from specattn.decoding import Target
from specattn.decoding.engine.loop import prefill
from specattn.ops import add_gumbel_noise
from specattn.tree import Tree

SPACINGS = 4  # of the model's dtype: logits that lie no further apart are a near-tie


@dataclass(frozen=True)
class Difference:
    """The first place where a text is not the first method's.

    `gap` is how far the tokens' logits are apart in one pass over the text before; above
    temperature 0 it is that of their scores, whose greatest is drawn (docs/sampling.md). Over a
    cache of 8 bits a key may be stored one step apart: there `bound` is what 8 bits change in
    all logits of the place, root mean square.
    """

    prompt: int  # its number
    position: int  # of the new token, from 0
    tokens: tuple[int | None, int | None]  # the first method's and this one's; None: its end
    gap: float | None = None
    bound: float | None = None  # up to which gap it is a near-tie

    @property
    def near_tie(self) -> bool:
        """Whether rounding may have decided."""
        return self.gap is not None and self.bound is not None and self.gap <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` writes of it."""
        return {**asdict(self), "near_tie": self.near_tie}


def first_difference(
    session: DecodingSession, expected: Continuation, found: Continuation
) -> Difference | None:
    """Return where the texts of `found` first part from those of `expected`."""
    for number, (ours, theirs) in enumerate(zip(expected.tokens, found.tokens, strict=True)):
        if ours == theirs:
            continue
        pairs = list(zip_longest(ours, theirs))
        position = next(n for n, (a, b) in enumerate(pairs) if a != b)
        tokens = pairs[position]
        if None in tokens:
            return Difference(number, position, tokens)
        before = session.prompts[number].tokens + ours[:position]
        logits, temperature = _logits(session, before), session.options.temperature
        rounding = 0.0
        if session.options.kv_dtype is not None:
            exact, logits = logits, _logits(session, before, session.options.kv_dtype)
            rounding = (logits - exact).square().mean().sqrt().item() / (temperature or 1)
        scores = logits / (temperature or 1)
        spacing = torch.finfo(session.model.dtype).eps * scores[list(tokens)].abs().max().item()
        if temperature > 0:
            place = torch.tensor([[number], [len(before)]], device=scores.device)
            scores = add_gumbel_noise(scores.float()[None], session.options.seed, *place)[0]
        gap = (scores[tokens[0]] - scores[tokens[1]]).abs().item()
        return Difference(number, position, tokens, gap, max(SPACINGS * spacing, rounding))
    return None


@torch.no_grad()
def _logits(session: DecodingSession, text: list[int], kv_dtype: str | None = None) -> torch.Tensor:
    """Return the logits [V] of the token after `text`, in float32 at least, with its penalties.

    With `kv_dtype` over such a cache, otherwise over keys and values as they are.
    """
    ids: Any = torch.tensor([text], device=session.model.device)
    if kv_dtype is None:
        logits: Any = session.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
    else:
        target = Target(session.model, 1, len(text), session.options.compile, kv_dtype=kv_dtype)
        prefill(target, list(ids))
        logits = target.verify(Tree.chain(0, device=ids.device), ids[:, -1:]).logits[:, -1]
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    if session.options.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(session.options.repetition_penalty)(ids, logits)
    return session.penalty()(ids, logits)[0]


def describe(session: DecodingSession, difference: Difference, first: str, other: str) -> str:
    """Say it in a line."""
    words = " and ".join(
        "the end" if token is None else f"{session.tokenizer.decode([token])!r} ({token})"
        for token in difference.tokens
    )
    where = f"{other} parts from {first} at new token {difference.position}"
    if len(session.prompts) > 1:
        where += f" of {session.prompts[difference.prompt].file}"
    if difference.gap is None:
        return f"{where}: {words}"
    verdict = "a near-tie" if difference.near_tie else "no near-tie"
    compared = "logits" if session.options.temperature == 0 else "scores"
    kv_dtype = session.options.kv_dtype
    if kv_dtype is None:
        dtype = str(session.model.dtype).removeprefix("torch.")
        bound = f"{SPACINGS} spacings of {dtype}"
    else:
        bound = f"what keys and values of {kv_dtype} change in logits"
        if difference.near_tie:
            verdict += " that the rounding of a key may have decided"
    return (
        f"{where}: {words}, whose {compared} are {difference.gap:.2g} apart: {verdict} (up to "
        f"{difference.bound:.2g}, {bound})"
    )
