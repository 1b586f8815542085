"""The texts of a run: unpadded for methods, as they came for processors, and when each ends."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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
    """Ends every text at its next token once it has been asked to.

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


class _Rules(NamedTuple):
    """When a row ends: at a length, at a token, on request, or when other criteria say so."""

    max_length: float
    end_tokens: set[int]
    requests: list[StopRequest]
    others: StoppingCriteriaList


def _rules(criteria: StoppingCriteriaList) -> _Rules:
    """Return criteria as rules; asking one of transformers' takes longer than the answer."""
    lengths = [c for c in criteria if type(c) is MaxLengthCriteria]
    plain = [c for c in criteria if type(c) is EosTokenCriteria]
    requests = [c for c in criteria if isinstance(c, StopRequest)]
    others = [c for c in criteria if c not in [*lengths, *plain, *requests]]
    return _Rules(
        min((c.max_length for c in lengths), default=math.inf),
        _end_tokens(plain),
        requests,
        StoppingCriteriaList(others),
    )


def _end_tokens(criteria: Iterable[StoppingCriteria]) -> set[int]:
    found = [c.eos_token_id for c in criteria if isinstance(c, EosTokenCriteria)]
    return {token for tokens in found for token in tokens.flatten().tolist()}


class Sequences:
    """The texts of all requests of a run; each row has its own length.

    Methods see texts without padding: a token's index is its position. Logits processors and
    stopping criteria see `padded_rows`: padding on the left where a caller of transformers has put
    some, prompt, new tokens.

    Parameters
    ----------
    input_ids : Tensor, int64 [R, L]
        Prompts; whatever stands before and behind them is padding.
    padding : sequence of int
        Leading padding tokens of each row.
    room : int
        Most tokens that a padded row and a draft behind it can have.
    stopping_criteria : StoppingCriteriaList, or one for each row
    device : torch.device
    num_pregenerated : int
        Tokens at the end of each prompt that an earlier run has generated.
    ends : sequence of int, optional
        Where each prompt ends in its row; by default all end with the rows.

    Attributes
    ----------
    active : list of int
        The row of each request in the running batch; finished rows have left it.
    room : int
        Most tokens that can follow a prompt, those of a last draft included.
    padded_rows : Tensor, int64 [R, room], on the device
        What stands behind the end of a row means nothing.
    padding, ends : list of int
        Where each text begins and ends in its padded row.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        padding: Sequence[int],
        room: int,
        stopping_criteria: StoppingCriteriaList | Sequence[StoppingCriteriaList],
        device: torch.device,
        num_pregenerated: int = 0,
        ends: Sequence[int] | None = None,
    ):
        rows, width = input_ids.shape
        self._host = torch.zeros(rows, room, dtype=torch.int64)
        self._host[:, :width] = input_ids
        self._tokens = self._host.numpy()  # the same memory; quicker to write to
        self._starts, self._num_pregenerated = list(ends or [width] * rows), num_pregenerated
        self.padded_rows = self._host.to(device)
        self.padding, self.ends = list(padding), list(self._starts)
        self.active = list(range(rows))
        self.criteria = list(stopping_criteria)
        if isinstance(stopping_criteria, StoppingCriteriaList):
            self.criteria = [stopping_criteria] * rows
        self._limits = [criteria.max_length or room for criteria in self.criteria]
        self._rules = [_rules(criteria) for criteria in self.criteria]
        self.room = room - max(self._limits) + max(map(operator.sub, self._limits, self._starts))
        self._criteria_device = device
        if all(type(criterion) in _ON_HOST for own in self.criteria for criterion in own):
            self._criteria_device = torch.device("cpu")

    @property
    def host_rows(self) -> torch.Tensor:
        """`padded_rows` on the host."""
        return self._host

    @property
    def prompts(self) -> list[torch.Tensor]:
        """Every row's prompt, int64 [L_r], on the host."""
        spans = zip(self._host, self.padding, self._starts, strict=True)
        return [row[begin:end] for row, begin, end in spans]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row's text, finished rows included."""
        return [end - begin for begin, end in zip(self.padding, self.ends, strict=True)]

    @property
    def active_lengths(self) -> list[int]:
        """Tokens of every running request's text."""
        return [self.length(row) for row in self.active]

    def length(self, row: int) -> int:
        """Return the number of tokens of a row's text."""
        return self.ends[row] - self.padding[row]

    def text(self, row: int) -> torch.Tensor:
        """Return a row's text, prompt and new tokens: a view, int64 [L_r], on the host."""
        return self._host[row, self.padding[row] : self.ends[row]]

    def generated(self, row: int) -> torch.Tensor:
        """Return the end of a row's text that was generated, by an earlier run too."""
        return self._host[row, self.generated_from[row] : self.ends[row]]

    @property
    def generated_from(self) -> list[int]:
        """Where in its padded row what was generated begins, by an earlier run too."""
        return [start - self._num_pregenerated for start in self._starts]

    def tokens_between(self, row: int, begin: int, end: int) -> list[int]:
        """Return a part of a padded row."""
        tokens: list[int] = self._tokens[row, begin:end].tolist()
        return tokens

    def new_tokens(self, row: int) -> list[int]:
        """Return what this run has emitted to a row."""
        return self._host[row, self._starts[row] : self.ends[row]].tolist()

    def end_tokens(self, row: int) -> set[int]:
        """Return the tokens that end a row."""
        return _end_tokens(self.criteria[row])

    def tokens_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the running requests' tokens at `positions` of their texts.

        Parameters
        ----------
        positions : Tensor, int64 [B, n], on the device
            Not negative. Those behind the end of a text give tokens that mean nothing.

        Returns
        -------
        Tensor, int64 [B, n], on the device
        """
        begin = positions.new_tensor([self.padding[row] for row in self.active])[:, None]
        columns = (begin + positions).clamp_max(self.padded_rows.shape[1] - 1)
        return self.padded_rows[positions.new_tensor(self.active)].gather(1, columns)

    @property
    def newest(self) -> list[int]:
        """Every running request's last token: the root of its next tree."""
        return [int(self._tokens[row, self.ends[row] - 1]) for row in self.active]

    def drafts(self, row: int) -> int:
        """Return how many drafted tokens a row has use for: one more follows the last of them."""
        return self._limits[row] - self.ends[row] - 1

    @property
    def draft_depth(self) -> int:
        """The longest path that a running request has use for."""
        return max(self.drafts(row) for row in self.active)

    def continued(self, row: int, path: list[int]) -> torch.Tensor:
        """Return a padded row as if `path` followed its text, on the CPU.

        Returns
        -------
        Tensor, int64 [1, ends + path]
            A view, until the next call.
        """
        begin, end = self.ends[row], self.ends[row] + len(path)
        if path:
            self._tokens[row, begin:end] = path
        return self._host[row : row + 1, :end]

    def extend(self, row: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Emit tokens one by one until one of them ends the row.

        Returns
        -------
        emitted : list of int
            The tokens up to the one that ended the row.
        finished : bool
        """
        begin, finished = self.ends[row], False
        rules = self._rules[row]
        for place, token in enumerate(tokens, start=begin):
            self._tokens[row, place] = token
        for end, token in enumerate(tokens, start=begin + 1):
            finished = end >= rules.max_length or token in rules.end_tokens
            if rules.requests:
                finished |= any(request.asked for request in rules.requests)
            if rules.others:
                so_far = self._host[row : row + 1, :end].to(self._criteria_device)
                finished |= bool(rules.others(so_far, None))
            self.ends[row] = end
            if finished:
                break
        end = self.ends[row]
        if self.padded_rows is not self._host:
            self.padded_rows[row, begin:end] = self._host[row, begin:end]
        return tokens[: end - begin], finished

    def padded(self, pad_token_id: int) -> torch.Tensor:
        """Return all rows, padded on the right to the longest: int64 [R, longest], on the host."""
        longest = max(self.ends)
        beyond = torch.arange(longest) >= torch.tensor(self.ends)[:, None]
        return self._host[:, :longest].masked_fill(beyond, pad_token_id)


class TokenIndex(Protocol):
    """What indexes a text token by token."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""


I = TypeVar("I", bound=TokenIndex)


class RequestIndexes(Generic[I]):
    """One index per row, given every token of its text once and in order.

    Parameters
    ----------
    sequences : Sequences
    make : callable
        Returns an empty index.
    prompts : bool
        Whether they index the prompts too, or generated tokens alone.
    """

    def __init__(self, sequences: Sequences, make: Callable[[], I], *, prompts: bool):
        self.sequences = sequences
        self._indexes = [make() for _ in sequences.lengths]
        # Where in its padded row each text is indexed up to.
        self._indexed = sequences.padding.copy() if prompts else sequences.generated_from
        self.catch_up()

    @property
    def active(self) -> list[I]:
        """The indexes of the running batch, request by request."""
        return [self._indexes[row] for row in self.sequences.active]

    def catch_up(self) -> None:
        """Index what has been emitted to the running requests since the last call."""
        for row in self.sequences.active:
            new = self.sequences.tokens_between(row, self._indexed[row], self.sequences.ends[row])
            self._indexes[row].extend(new)
            self._indexed[row] = self.sequences.ends[row]
