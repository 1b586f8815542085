"""The texts of a run as transformers shows them, and when each of them ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)


class StopRequest(StoppingCriteria):
    """Ends every text at its next token once somebody has asked for it.

    Attributes
    ----------
    asked : bool
    """

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return whether each row shall end, bool [B]."""
        return torch.full((len(input_ids),), self.asked, device=input_ids.device)


# They read nothing but the tokens, so they may look at the host's copy; others may hold tensors of
# the model's device.
_ON_HOST = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopRequest, StopStringCriteria)


class Sequences:
    """Rows of padding, prompt and new tokens: what logits processors and stopping criteria see.

    Every row has its own length. The device holds a copy, which processors read.

    Parameters
    ----------
    input_ids : Tensor, int64 [R, L]
        Prompts, padded on the left.
    padding : sequence of int
        Leading padding tokens of each row.
    room : int
        Most tokens that a row and a draft behind it can have.
    stopping_criteria : StoppingCriteriaList
    device : torch.device
    already : int
        Tokens at the end of each prompt that an earlier run has generated.

    Attributes
    ----------
    tokens : Tensor, int64 [R, room], host
    on_device : Tensor, int64 [R, room]
        The same numbers; what follows a row's length is 0.
    generated_from : int
        Where the generated tokens begin, those of an earlier run included.
    lengths : list of int
        Current length of each row, padding included.
    active : list of int
        The row of each request in the running batch; finished rows have left it.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        padding: Sequence[int],
        room: int,
        stopping_criteria: StoppingCriteriaList,
        device: torch.device,
        already: int = 0,
    ):
        rows, self.prompt_length = input_ids.shape
        self.generated_from = self.prompt_length - already
        self.tokens = torch.zeros(rows, room, dtype=torch.int64)
        self.tokens[:, : self.prompt_length] = input_ids
        self.on_device = self.tokens.to(device)
        self.padding = list(padding)
        self.lengths = [self.prompt_length] * rows
        self.active = list(range(rows))
        self.stopping_criteria = stopping_criteria
        self.criteria_device = device
        if all(type(criterion) in _ON_HOST for criterion in stopping_criteria):
            self.criteria_device = torch.device("cpu")

    def prompt(self, row: int) -> torch.Tensor:
        """Return a row's prompt without padding."""
        return self.tokens[row, self.padding[row] : self.prompt_length]

    def extend(self, row: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Emit tokens one by one until one of them ends the row.

        Returns
        -------
        emitted : list of int
            The tokens up to the one that ended the row.
        finished : bool
        """
        begin, finished = self.lengths[row], False
        for end, token in enumerate(tokens, start=begin + 1):
            self.tokens[row, end - 1] = token
            so_far = self.tokens[row : row + 1, :end].to(self.criteria_device)
            finished = bool(self.stopping_criteria(so_far, None))
            self.lengths[row] = end
            if finished:
                break
        end = self.lengths[row]
        self.on_device[row, begin:end] = self.tokens[row, begin:end]
        return tokens[: end - begin], finished

    def padded(self, pad_token_id: int) -> torch.Tensor:
        """Return all rows, padded on the right to the longest: int64 [R, longest], on the host."""
        longest = max(self.lengths)
        beyond = torch.arange(longest) >= torch.tensor(self.lengths)[:, None]
        return self.tokens[:, :longest].masked_fill(beyond, pad_token_id)


class Reader(Protocol):
    """What learns a text token by token."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Read on."""


R = TypeVar("R", bound=Reader)


class Readers(Generic[R]):
    """One reader per row, told every token of its text once and in order.

    Parameters
    ----------
    sequences : Sequences
    make : callable
        Returns a reader that has read nothing.
    prompts : bool
        Whether they read the prompts too, or generated tokens alone.
    """

    def __init__(self, sequences: Sequences, make: Callable[[], R], *, prompts: bool):
        self.sequences = sequences
        rows = len(sequences.lengths)
        self._readers = [make() for _ in range(rows)]
        self._read = list(sequences.padding) if prompts else [sequences.generated_from] * rows
        self.catch_up()

    @property
    def active(self) -> list[R]:
        """The readers of the running batch, request by request."""
        return [self._readers[row] for row in self.sequences.active]

    def catch_up(self) -> None:
        """Let the running requests' readers read what has been emitted since the last call."""
        for row in self.sequences.active:
            begin, end = self._read[row], self.sequences.lengths[row]
            self._readers[row].extend(self.sequences.tokens[row, begin:end].tolist())
            self._read[row] = end
