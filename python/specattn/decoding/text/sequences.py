"""The texts of a run, each as long as it is, and when each ends."""

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
    """The texts of all requests of a run, in the rows of one buffer; each has its own length.

    Methods see texts: a token's index is its position. Logits processors and stopping criteria see
    rows: a text behind the padding that a caller of transformers has put before it, if any.

    Parameters
    ----------
    rows : sequence of Tensor, int64 [padding + L_r]
        Every prompt behind its padding.
    padding : sequence of int
        Leading padding tokens of each row.
    room : int
        Most tokens that a row and a draft behind it can have.
    stopping_criteria : StoppingCriteriaList, or one for each row
    device : torch.device
    num_pregenerated : int
        Tokens at the end of each prompt that an earlier run has generated.

    Attributes
    ----------
    active : list of int
        The row of each request in the running batch; finished rows have left it.
    room : int
        Most tokens that can follow a prompt, those of a last draft included.
    host_rows : Tensor, int64 [R, room]
        What stands behind the end of a row means nothing.
    padded_rows : Tensor, int64 [R, room]
        The same on the device.
    padding, ends : list of int
        Where each text begins and ends in its row.
    generated_from : list of int
        Where in its row what was generated begins, by an earlier run too.
    """

    def __init__(
        self,
        rows: Sequence[torch.Tensor],
        padding: Sequence[int],
        room: int,
        stopping_criteria: StoppingCriteriaList | Sequence[StoppingCriteriaList],
        device: torch.device,
        num_pregenerated: int = 0,
    ):
        self.padding, self.ends = list(padding), [len(row) for row in rows]
        self.host_rows = torch.zeros(len(rows), room, dtype=torch.int64)
        for own, row in zip(self.host_rows, rows, strict=True):
            own[: len(row)] = row
        self._tokens = self.host_rows.numpy()  # the same memory; quicker to write to
        self.padded_rows = self.host_rows.to(device)
        self._starts, self.active = self.ends.copy(), list(range(len(rows)))
        self.generated_from = [start - num_pregenerated for start in self._starts]
        if isinstance(stopping_criteria, StoppingCriteriaList):
            stopping_criteria = [stopping_criteria] * len(rows)
        self._limits = [criteria.max_length or room for criteria in stopping_criteria]
        self._rules = [_rules(criteria) for criteria in stopping_criteria]
        self._end_tokens = [_end_tokens(criteria) for criteria in stopping_criteria]
        self.room = room - max(self._limits) + max(map(operator.sub, self._limits, self._starts))
        on_host = all(type(one) in _ON_HOST for own in stopping_criteria for one in own)
        self._criteria_device = torch.device("cpu") if on_host else device

    @property
    def prompts(self) -> list[torch.Tensor]:
        """Every row's prompt, int64 [L_r], on the host."""
        spans = zip(self.host_rows, self.padding, self._starts, strict=True)
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
        return self.host_rows[row, self.padding[row] : self.ends[row]]

    def generated(self, row: int) -> torch.Tensor:
        """Return the end of a row's text that was generated, by an earlier run too."""
        return self.host_rows[row, self.generated_from[row] : self.ends[row]]

    def new_tokens(self, row: int) -> list[int]:
        """Return what this run has emitted to a row."""
        return self.host_rows[row, self._starts[row] : self.ends[row]].tolist()

    def tokens_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the running requests' tokens at `positions` [B, n]; beyond a text's end any."""
        begin = positions.new_tensor([self.padding[row] for row in self.active])[:, None]
        columns = (begin + positions).clamp_max(self.padded_rows.shape[1] - 1)
        return self.padded_rows[positions.new_tensor(self.active)].gather(1, columns)

    def drafts(self, row: int) -> int:
        """Return how many drafted tokens a row has use for: one more follows the last of them."""
        return self._limits[row] - self.ends[row] - 1

    def goes_on(self, row: int, path: list[int]) -> bool:
        """Whether a row's text can go on behind a path: nothing in it ends the text before."""
        return len(path) <= self.drafts(row) and not any(
            token < 0 or token in self._end_tokens[row] for token in path
        )

    @property
    def draft_depth(self) -> int:
        """The longest path that a running request has use for."""
        return max(self.drafts(row) for row in self.active)

    def continued(self, row: int, path: list[int]) -> torch.Tensor:
        """Return a row as if `path` followed its text, [1, n], on the CPU: until the next call."""
        begin, end = self.ends[row], self.ends[row] + len(path)
        if path:
            self._tokens[row, begin:end] = path
        return self.host_rows[row : row + 1, :end]

    def extend(self, row: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Emit tokens one by one; return those up to one that ends the row, and whether one did."""
        begin, finished = self.ends[row], False
        rules = self._rules[row]
        self._tokens[row, begin : begin + len(tokens)] = tokens
        for end, token in enumerate(tokens, start=begin + 1):
            finished = end >= rules.max_length or token in rules.end_tokens
            if rules.requests:
                finished |= any(request.asked for request in rules.requests)
            if rules.others:
                so_far = self.host_rows[row : row + 1, :end].to(self._criteria_device)
                finished |= bool(rules.others(so_far, None))
            self.ends[row] = end
            if finished:
                break
        end = self.ends[row]
        if self.padded_rows is not self.host_rows:
            self.padded_rows[row, begin:end] = self.host_rows[row, begin:end]
        return tokens[: end - begin], finished

    def padded(self, pad_token_id: int) -> torch.Tensor:
        """Return all rows, padded on the right to the longest: int64 [R, longest], on the host."""
        longest = max(self.ends)
        beyond = torch.arange(longest) >= torch.tensor(self.ends)[:, None]
        return self.host_rows[:, :longest].masked_fill(beyond, pad_token_id)


class TokenIndex(Protocol):
    """What indexes a text token by token."""

    def extend(self, tokens: Iterable[int]) -> None: ...  # noqa: D102


I = TypeVar("I", bound=TokenIndex)


class RequestIndexes(Generic[I]):
    """One index per row, given every token of its text once and in order.

    `make` returns an empty one; `prompts` says whether they index more than what was generated.
    """

    def __init__(self, sequences: Sequences, make: Callable[[], I], *, prompts: bool):
        self.sequences = sequences
        self._indexes = [make() for _ in sequences.lengths]
        # Where in its padded row each text is indexed up to.
        self._indexed = (sequences.padding if prompts else sequences.generated_from).copy()
        self.catch_up()

    @property
    def active(self) -> list[I]:
        """The indexes of the running batch, request by request."""
        return [self._indexes[row] for row in self.sequences.active]

    def catch_up(self) -> None:
        """Index what has been emitted to the running requests since the last call."""
        for row in self.sequences.active:
            begin, end = self._indexed[row], self.sequences.ends[row]
            self._indexes[row].extend(self.sequences.host_rows[row, begin:end].tolist())
            self._indexed[row] = end
