"""What a run cost and what its drafts were worth, with every figure's definition."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from specattn.decoding.text.rounds import PassTimes, Round, by_drafter

_COUNTS = ("prompt_tokens", "new_tokens", "rounds", "drafted", "accepted", "discarded")
_RATES = ("mean_acceptance_length", "acceptance_rate", "position_rates", "conditional_rates")
_SECONDS = (
    "prefill_seconds",
    "decode_seconds",
    "draft_seconds",
    "target_seconds",
    "accept_seconds",
)
_BYTES = "cache_bytes", "drafter_cache_bytes", "graph_bytes"
_OF_THE_RUN = (*_SECONDS, "tokens_per_second", "passes", *_BYTES)
MEANINGS = {
    "tokens/s": "new tokens per second, prefill left out",
    "total": "seconds, prefill included",
    "new": "new tokens",
    "passes": "passes of the full target",
    "per pass": "tokens per pass, bonus token included",
    "accepted": "share of the drafted tokens that were accepted",
    "prefill": "seconds of reading the prompt",
}
"""What the figures of a run mean (`Statistics.figures`)."""


@dataclass
class RequestStatistics:
    """Counts of one request.

    A *round* is one verification pass of the target over the root and the drafted tree; plain
    decoding is a round per token. Depth 1 is the first drafted token.

    Attributes
    ----------
    prompt_tokens : int
        Without padding.
    new_tokens : int
        Tokens emitted, a stop token included: ``accepted + rounds - discarded``.
    rounds : int
        Verification passes, the first one (which has nothing drafted) included.
    drafted : int
        Drafted tokens that were verified: all nodes of all trees but the roots.
    accepted : int
        Drafted tokens that were accepted, including those discarded afterwards.
    discarded : int
        Tokens accepted or drawn after the token at which the request stopped.
    offered_at : list of int
        Entry i: rounds whose first i drafted tokens were accepted and whose tree went deeper.
    accepted_at : list of int
        Entry i: rounds that accepted more than i drafted tokens.
    history : list of Round
        Every round, in order.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    discarded: int = 0
    offered_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    history: list[Round] = field(default_factory=list, repr=False)

    def record(self, round: Round) -> None:
        """Count one round."""
        self.history.append(round)
        self.rounds += 1
        self.drafted += round.drafted
        self.accepted += round.accepted
        self.new_tokens += len(round.tokens)
        self.discarded += round.accepted + 1 - len(round.tokens)
        for counts in (self.offered_at, self.accepted_at):
            counts.extend([0] * (round.depth - len(counts)))
        for level in range(round.depth):
            self.offered_at[level] += round.accepted >= level
            self.accepted_at[level] += round.accepted > level

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification pass, **bonus token included**: ``1 + accepted / rounds``."""
        return 1 + _ratio(self.accepted, self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted: ``accepted / drafted``."""
        return _ratio(self.accepted, self.drafted)

    @property
    def position_rates(self) -> list[float]:
        """Per depth, the share of **all** rounds that accepted a token there (unconditional)."""
        return [_ratio(count, self.rounds) for count in self.accepted_at]

    @property
    def conditional_rates(self) -> list[float]:
        """Per depth, the acceptance given that all before it were accepted (PosS' *pos-acc*)."""
        return [_ratio(*counts) for counts in zip(self.accepted_at, self.offered_at, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Return counts and rates, ready for JSON; not the `history`."""
        return {name: getattr(self, name) for name in (*_COUNTS, *_RATES)}


@dataclass
class Statistics:
    """A run of one or more requests.

    Attributes
    ----------
    requests : list of RequestStatistics
        In the order of the prompts.
    prefill_seconds : float
        All prompt tokens but the last of each request, which is the root of the first round.
    draft_seconds : float
        Proposing trees, and selecting what the next draft will read.
    target_seconds : float
        Verification passes of the target, with its head.
    accept_seconds : float
        Logits processors, acceptance, commit, stopping criteria and streaming.
    details : dict
        Figures that only this method has, ready for JSON (`Drafter.details`), and `by_drafter` of
        those whose rounds name who drafted.
    times : list of PassTimes
        Of every pass: entry n belongs to round n of each request.
    cache_bytes : int
        What the target's KV cache takes, room for new tokens and one draft included; on this rank.
        One that a run borrows from the last one may have more room than the run needs.
    drafter_cache_bytes : int
        What the caches of trained drafters, or of a model that drafts, take beside it.
    graph_bytes : int
        What the process' CUDA graphs held at the end of the run (`specattn.blocks.graph_bytes`).
    """

    requests: list[RequestStatistics]
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    accept_seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    times: list[PassTimes] = field(default_factory=list, repr=False)
    cache_bytes: int = 0
    drafter_cache_bytes: int = 0
    graph_bytes: int = 0

    def __str__(self) -> str:
        rows = self.figures().items()
        names, values = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{name:{names}}  {x:>{values}}  {MEANINGS[name]}" for name, x in rows)

    @property
    def total(self) -> RequestStatistics:
        """All requests' counts together; its rates weigh every round alike."""
        total = RequestStatistics()
        for name in _COUNTS:
            setattr(total, name, sum(getattr(request, name) for request in self.requests))
        for name in ("offered_at", "accepted_at"):
            columns = zip_longest(*(getattr(one, name) for one in self.requests), fillvalue=0)
            setattr(total, name, list(map(sum, columns)))
        return total

    @property
    def passes(self) -> int:
        """Batched verification passes: the rounds of the longest-running request."""
        return max((request.rounds for request in self.requests), default=0)

    @property
    def decode_seconds(self) -> float:
        """Everything but the prefill."""
        return self.draft_seconds + self.target_seconds + self.accept_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests per second of decoding, prefill left out."""
        return _ratio(sum(request.new_tokens for request in self.requests), self.decode_seconds)

    def figures(self) -> dict[str, str]:
        """Return what a table shows of a run, as text by the names in `MEANINGS`."""
        total = self.total
        return {
            "tokens/s": f"{self.tokens_per_second:.1f}",
            "total": f"{self.prefill_seconds + self.decode_seconds:.2f} s",
            "new": f"{total.new_tokens}",
            "passes": f"{self.passes}",
            "per pass": f"{total.mean_acceptance_length:.2f}",
            "accepted": f"{total.acceptance_rate:.0%}" if total.drafted else "-",
            "prefill": f"{self.prefill_seconds:.2f} s",
        }

    def by_drafter(self, method: str) -> dict[str, Any]:
        """Return rounds, tokens and times by who drafted (`rounds.by_drafter`)."""
        return by_drafter([request.history for request in self.requests], self.times, method)

    def to_dict(self) -> dict[str, Any]:
        """Return figures, ready for JSON: times, the totals, and each request's counts."""
        return {
            **{name: getattr(self, name) for name in _OF_THE_RUN},
            **self.total.to_dict(),
            "details": self.details,
            "requests": [request.to_dict() for request in self.requests],
        }


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Moments of a device, which may be noted without waiting for it.

    On CUDA a moment is an event in the current stream, so the times are the device's own.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.on_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Note this moment."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, moment: Any) -> bool:
        """Whether the device has come that far."""
        return not self.on_cuda or moment.query()

    def wait(self, moment: Any) -> None:
        """Wait until the device has come that far."""
        if self.on_cuda:
            moment.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two moments that have passed."""
        return begin.elapsed_time(end) / 1e3 if self.on_cuda else end - begin


class Stopwatch:
    """Split a run's time between its parts without waiting for the device.

    `lap` books the time since the last lap; moments are read once, at the end.
    """

    def __init__(self, device: torch.device):
        self.clock = Clock(device)
        self.start = self.clock.now()
        self.laps: list[tuple[str, Any]] = []

    def lap(self, part: str) -> None:
        """Book the time since the last lap on `part`."""
        self.laps.append((part, self.clock.now()))

    def seconds(self) -> list[tuple[str, float]]:
        """Return every lap's part and seconds; waits for the last one."""
        begins = [self.start, *(moment for _, moment in self.laps)]
        # Not for the whole device: while another thread captures a graph, that is an error in both.
        self.clock.wait(begins[-1])
        return [
            (part, self.clock.seconds(begin, end))
            for begin, (part, end) in zip(begins, self.laps, strict=False)
        ]

    def totals(self) -> dict[str, float]:
        """Return the seconds booked on every part; waits for the last lap."""
        totals = defaultdict[str, float](float)
        for part, seconds in self.seconds():
            totals[part] += seconds
        return totals


def distinct(tokens: Sequence[int], n: int) -> float:
    """Return the share of different n-grams among all of a text (*Distinct-n*, Li et al. 2016)."""
    count = len(tokens) - n + 1
    ngrams = set(zip(*(tokens[start:] for start in range(n)), strict=False))
    return _ratio(len(ngrams), max(count, 0))


def _ratio(count: float, of: float) -> float:
    """Return ``count / of``, and 0 where there is nothing to count."""
    return count / of if of else 0.0
