"""transformers' logits processors for one node of a draft, where the host computes.

What `ContextualProcessors` does for many requests at once, so that a GPU is asked seldom, costs a
CPU more than the processors themselves. Here a text is shown where it stands, its path behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import generation as hf

from specattn.decoding.text.penalty import ContextualPenalty
from specattn.decoding.text.sequences import Sequences

CONTEXT_FREE = (
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
    hf.MinPLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.TemperatureLogitsWarper,
    hf.TopHLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TypicalLogitsWarper,
)
"""Processors that look at the logits alone. All others are given each node's own context; one with
an attribute ``context_window`` is given no more than so many last tokens of it."""

LENGTH_ONLY = (
    hf.ExponentialDecayLengthPenalty,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor,
)
"""Processors that look at no more of a context than its length."""

_BY_TEXT = (
    ContextualPenalty,
    hf.NoBadWordsLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.RepetitionPenaltyLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
)

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``step(text, scores)``: the processed scores [1, V] of the token that follows a text [1, L]."""


def knows_rows(processor: Any) -> bool:
    """Whether a processor may hold data for each row of the batch."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
        return True
    return type(processor) not in (*CONTEXT_FREE, *LENGTH_ONLY, *_BY_TEXT)


def drawn_by(processors: Sequence[Any]) -> tuple[float, int] | None:
    """Return temperature and `top_k`, 0 for all, where logits meet nothing else; else None."""
    divides = [type(own) for own in processors[:1]] == [hf.TemperatureLogitsWarper]
    temperature = float(processors[0].temperature) if divides else 1.0
    rest = processors[divides:]
    if not rest:
        return temperature, 0
    filters = len(rest) == 1 and type(rest[0]) is hf.TopKLogitsWarper
    return (temperature, rest[0].top_k) if filters and rest[0].filter_value == -np.inf else None


def temperature_of(processors: Sequence[Any]) -> float | None:
    """Return what logits are divided by where nothing else is done to them, else None."""
    found = drawn_by(processors)
    return found[0] if found is not None and not found[1] else None


class NodeProcessors:
    """The processors of one row of a run on the CPU; none knows rows, unless there is one row.

    `drawn_by` has temperature and `top_k` where logits meet nothing else, else None.
    """

    def __init__(self, processors: Sequence[Any], sequences: Sequences, row: int):
        self.sequences, self.row = sequences, row
        self._sees_texts = not all(type(own) in CONTEXT_FREE for own in processors)
        self.drawn_by = drawn_by(processors)
        self._steps = [self._step(own) for own in processors]

    def __call__(self, path: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Return the processed logits [V] of the token behind a path that follows the text.

        In float32, or whatever a processor returns; unprocessed where one looks at texts and the
        path cannot occur.
        """
        scores = logits.float()
        if not self._steps or self._sees_texts and not self.sequences.goes_on(self.row, path):
            return scores
        text = self.sequences.continued(self.row, path)
        scores = scores[None]
        for step in self._steps:
            scores = step(text, scores)
        return scores[0]

    def _step(self, processor: Any) -> Step:
        """Return a processor as a function of text and scores."""
        if type(processor) in CONTEXT_FREE:
            return lambda _, scores: processor(None, scores)
        if type(processor) is hf.MinLengthLogitsProcessor:
            return _without_end(processor.min_length, processor.eos_token_id)
        if type(processor) is hf.MinNewTokensLengthLogitsProcessor:
            shortest = processor.prompt_length_to_skip + processor.min_new_tokens
            return _without_end(shortest, processor.eos_token_id)
        whole_text = getattr(processor, "prompt_ignore_length", 0) is None
        if type(processor) is hf.RepetitionPenaltyLogitsProcessor and whole_text:
            said = _Vocabulary(self.sequences, self.row)
            return lambda text, scores: processor(said.of(text), scores)
        if (window := getattr(processor, "context_window", None)) is not None:
            padding = self.sequences.padding[self.row]
            return lambda text, scores: processor(text[:, padding:][:, -window:], scores)
        return processor


def _without_end(shortest: int, end_tokens: torch.Tensor) -> Step:
    """Forbid end tokens in shorter texts: what transformers finds by a search over V per call."""
    tokens = end_tokens.flatten().tolist()

    def step(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if text.shape[1] >= shortest:
            return scores
        inside = [token for token in tokens if 0 <= token < scores.shape[1]]
        if scores.dtype == torch.bfloat16:  # another processor's: numpy has none
            return scores.index_fill(
                1, torch.tensor(inside, dtype=torch.int64, device="cpu"), -torch.inf
            )
        if all(scores.numpy()[0, inside] == -np.inf):
            return scores
        scores = scores.clone()
        scores.numpy()[0, inside] = -np.inf
        return scores

    return step


class _Vocabulary:
    """The different tokens of a row's text, for a processor that asks for no more than those."""

    def __init__(self, sequences: Sequences, row: int):
        self.sequences, self.row = sequences, row
        self._tokens = np.empty(sequences.padded_rows.shape[1], dtype=np.int64)
        self._seen, self._length = set[int](), 0

    def of(self, text: torch.Tensor) -> torch.Tensor:
        """Return the tokens [1, n] of the row's text, each once, and those of a path behind it."""
        committed = self.sequences.ends[self.row]
        for token in text[0, self._length : committed].tolist():
            if token not in self._seen:
                self._tokens[len(self._seen)] = token
                self._seen.add(token)
        self._length = committed
        end = len(self._seen) + text.shape[1] - committed
        self._tokens[len(self._seen) : end] = text.numpy()[0, committed:]
        return torch.from_numpy(self._tokens[:end])[None]
