"""Auto in vLLM: each request drafts by whatever promises the most tokens per second, or nothing.

A step of vLLM verifies all its requests at once, drafts of any lengths beside each other. What they
may add to a step is chosen for all together, by what steps of so many rows took, and goes to the
likeliest tokens of all requests. What a text offers is known before; whether the target shall
draft for itself is tried out, as at home. (`specattn.decoding.Auto`; docs/vllm.md)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger

from specattn.decoding.drafting.gains import (
    NONE,
    Calibration,
    ChainGains,
    Effort,
    best_total,
    chains,
)
from specattn.decoding.drafting.pace import Arm, LookupBackoff, Pace
from specattn.decoding.drafting.timings import SIZES, Memory, Trials
from specattn.decoding.model.model import Model
from specattn.decoding.text.statistics import Clock

from .prepare import prepare
from .requests import Requests
from .self_drafts import SelfDrafts
from .texts import Chain, Text, Texts

_ROW = 16
ROWS = (_ROW, 17, 18, 20, 24, *(_ROW * size for size in SIZES[1:]))
"""Rows of a step for each of its requests, in sixteenths: few, so that each is met again."""
_LONGEST_OWN = 6  # tokens that the target drafts for itself at most
_OWN = "vegas"
_TRUSTED = 0.75  # what texts promise is worth, before any of it came true ...
_COLD = 3  # steps behind a prompt that take longer, whatever they draft
_JUDGED = 32.0  # ... and so many promised tokens later
_logger = init_logger("vllm.specattn")


@dataclass
class _Request:
    """What is known of a request."""

    text: Text
    gains: ChainGains  # of what the target drafts for it
    texts: Calibration  # of what texts promise
    steps: int = 0
    drafted: int = 0  # tokens that the target drafted in the last step ...
    expected: float = 0.0  # ... or how many of a draft from texts were to be accepted


class _Gains:
    """What chains bring the requests that run, each of which learns for itself."""

    def __init__(self) -> None:
        self.members: list[ChainGains] = []

    def learn(self, drafted: int, counts: Sequence[int | None]) -> None:
        """Do nothing: `_Request.gains` learn."""

    def table(self) -> Any:
        """Return what each effort brings a request in the mean."""
        return np.mean([one.table() for one in self.members], axis=0)


class _Offer(NamedTuple):
    """What texts offer a step: tokens that each request drafts; besides as `Pace` takes it."""

    lengths: list[int]
    promised: list[float]
    seconds: float
    row_seconds: float | None
    saved: float


class Auto:
    """Drafting by whatever is fastest, for vLLM's ``"method": "custom_class"``.

    Before each step every request drafts what followed its text's end before (suffix decoding and
    prompt lookup), what the target drafts for itself (Vegas), or nothing. It goes by the time that
    vLLM's own steps took. vLLM's rejection sampler takes drafts without probabilities for certain
    ones: texts keep the target's distribution at every temperature.

    Parameters
    ----------
    vllm_config : VllmConfig
        Of its `speculative_config`: `num_speculative_tokens`, the longest draft of a request.

    Attributes
    ----------
    vegas : bool
        Whether the target may draft for itself. It cannot where a layer's attention is not ours, or
        where the model is split into stages or runs in replicas: that is said once, and drafts come
        from texts alone.
    ratio, min_tokens
        As for `Vegas`.
    corpus : sequence of path
        Files of UTF-8 that are looked up beside each text.
    cache : path or None
        Folder where indexes of `corpus` are kept for other processes.
    remember : bool
        Whether requests learn from each other: what earlier ones were given is looked up for later
        ones, and how often drafts were accepted is known of all together. Then a user may tell from
        the times of his tokens what other users' texts said. By default a request knows its own
        text; what steps take is known of all.

    Raises
    ------
    ValueError
        A file of `corpus` cannot be read, or its index needs the C++ module, which is not built.
    """

    vegas = True
    ratio = 0.07
    min_tokens = 256
    corpus: Sequence[Path | str] = ()
    cache: Path | str | None = None
    remember = False

    def __init__(self, vllm_config: VllmConfig):
        self.config, model = vllm_config, vllm_config.model_config
        self.most = vllm_config.speculative_config.num_speculative_tokens
        self.capacity = model.max_model_len
        self.texts = Texts(
            model.get_vocab_size(),
            str(model.tokenizer),
            self.most,
            corpus=self.corpus,
            cache=self.cache,
            remember=self.remember,
        )
        self.requests = Requests(self._new, lambda request: self.texts.ended(request.text))
        self.lengths: list[int] = []  # of the requests that got a token in the last step
        clock = Clock(vllm_config.device_config.device)
        memory = Memory(clock, lambda: self.lengths, Model())
        self.efforts = chains(min(self.most, _LONGEST_OWN))
        self.sizes = [effort.depth + 1 for effort in self.efforts]
        self.gains = _Gains()
        gains = lambda *_: self.gains  # noqa: E731
        self.lookup = Arm(memory, "lookup", [NONE], ROWS, gains)
        rows = [_ROW * (effort.depth + 1) for effort in self.efforts]
        self.armed = Arm(memory, _OWN, self.efforts, rows, gains, "collecting")
        self.lookup.trials = Trials()
        self.pace = Pace({}, self.lookup.trials)
        self.own: SelfDrafts | None = None
        self.shared = self._unknown() if self.remember else None
        self.running: list[_Request] = []  # in the last step
        self.begun: Arm = self.lookup  # whose round that was, and how much that drafted
        self.effort, self.idle = NONE, False
        self.backoff = LookupBackoff(clock)
        self._costs: tuple[int, dict[int, float], dict[int, float]] = 0, {}, {}

    def load_model(self, model: Any) -> None:
        """Let the target draft for itself, or say why it cannot."""
        prepare(self.config)
        if not self.vegas:
            return
        try:
            own = SelfDrafts("Auto", self.config, self.most, self.ratio, self.min_tokens)
            own.load_model(model)
        except ValueError as reason:
            _logger.warning("%s. The target does not draft for itself", reason)
            return
        self.own, self.pace = own, Pace({_OWN: self.armed}, self.lookup.trials)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each row, and decide whether the next pass collects."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._skips():
            return drafts
        self.backoff.begin()
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        self.lengths = [int(num_tokens_no_spec[row]) for row in rows]
        found = self.requests.of_rows(rows, num_tokens_no_spec, token_ids_cpu)
        requests = [request for request, _ in found]
        wrote = [len(sampled_token_ids[row]) for row in rows]
        # One that begins reads more, even where its text is what another's was that has ended.
        went_on = all(len(new) == count for (_, new), count in zip(found, wrote, strict=True))
        self._learn(requests, wrote, alone=went_on and len(rows) == len(drafts))
        if not rows:
            if self.own is not None:
                self.own.collect(False)
            return drafts

        offered = list[Chain]()
        for (request, new), row, count in zip(found, rows, wrote, strict=True):
            text = token_ids_cpu[row, : num_tokens_no_spec[row]]
            request.text.extend(new.tolist(), count)
            chain = request.text.chain(text, min(self.most, self._room(len(text))))
            factor = request.texts.factor
            offered.append(Chain(chain.tokens, [min(1.0, factor * one) for one in chain.chances]))
        offer = self._offer(offered)
        self.backoff.found(offer.saved)
        chosen = self._chosen(rows, offer, num_tokens_no_spec)
        self.backoff.end("asked")
        own = self._draft(*chosen, offer, num_tokens_no_spec, token_ids_cpu)
        for row, request, chain, length in zip(rows, requests, offered, offer.lengths, strict=True):
            drafts[row] = own.get(row, chain.tokens[:length])
            request.drafted = len(own.get(row, ()))
            promised = 0.0 if row in own else sum(chain.chances[:length])
            request.expected = promised / request.texts.factor
        drafted = sum(map(len, drafts))
        self.idle = not drafted
        shape = len(rows) + drafted, bool(drafted)  # vLLM samples otherwise beside drafts
        self.begun.begin(self.effort, _rows(len(rows), drafted), shape)
        return drafts

    def _skips(self) -> bool:
        """Whether nothing is looked up, since that did not pay of late; the step is not timed.

        What it takes is known, and counts: by that what was too slow is tried again.
        What is written meanwhile is read before the next lookup.
        """
        waits = self.idle and self.pace.fastest is None
        if self.own is not None:  # ranks would have to agree on it
            waits = waits and not self.own.collects and self.own.ranks == 1
        if not waits or not self.backoff.skips():
            return False
        self.lookup.drop()
        passes = self.lookup.costs().passes
        passes.elapsed += passes.seconds(_ROW)
        self.lookup.trials.elapsed += passes.seconds(_ROW)
        return True

    def _learn(self, requests: list[_Request], wrote: list[int], alone: bool) -> None:
        """Learn from the step that has ended; its time counts if these went on in it `alone`."""
        same = len(requests) == len(self.running)
        for request in requests:
            request.steps += 1
            alone = alone and request.steps > _COLD
        for arm in (self.lookup, self.armed):
            if arm is self.begun and alone and same:  # one that has begun nothing notes nothing
                arm.learn(0, ())
            else:
                arm.drop()
        for request, count in zip(requests, wrote, strict=True):
            request.gains.learn(request.drafted, [count - 1])
            if request.expected:
                request.texts.learn(request.expected, count - 1)
            elif not request.drafted:
                request.texts.fade()
        self.running = requests
        self.gains.members = [request.gains for request in requests]

    def _offer(self, chains: list[Chain]) -> _Offer:
        """Return how much of these chains a step takes, and what that promises."""
        known, between = self.lookup.measured()
        if not known:
            return _Offer([0] * len(chains), [1.0] * len(chains), 0.0, None, 0.0)
        likeliest = sorted(
            (-chance, depth, request)
            for request, chain in enumerate(chains)
            for depth, chance in enumerate(chain.chances)
        )
        costs = self._costs_of(known, len(chains))
        drafted = self._drafted(costs, len(chains), [-chance for chance, *_ in likeliest])
        lengths = [0] * len(chains)
        for _, _, request in likeliest[:drafted]:
            lengths[request] += 1
        promised = [
            1 + sum(chain.chances[:length]) for chain, length in zip(chains, lengths, strict=True)
        ]
        plain, seconds = known[_ROW], known[_rows(len(chains), drafted)]
        saved = fmean(promised) * plain - seconds
        return _Offer(lengths, promised, seconds + between, plain + between, saved)

    def _costs_of(self, known: dict[int, float], requests: int) -> dict[int, float]:
        """Return the seconds of a step by the tokens that it has room for, ascending from 0."""
        if self._costs[:2] != (requests, known):  # most often the same object
            # Of two sizes that leave as much room the cheaper one comes last, and stays.
            room = {requests * (rows - _ROW) // _ROW: rows for rows in reversed(known)}
            costs = {most: known[rows] for most, rows in sorted(room.items())}
            self._costs = requests, known, costs
        return self._costs[2]

    def _drafted(self, costs: dict[int, float], requests: int, chances: list[float]) -> int:
        """Return the drafted tokens that pay; once in a while what seems to lose: some, or none.

        What steps of the other kind took may have been chance, and is met in no other way.
        """
        drafted = best_total(costs, requests, chances)
        more = {most: seconds for most, seconds in costs.items() if most}
        if not more or not chances:
            return drafted
        tried = drafted or best_total(more, requests, chances)
        seconds = next(seconds for most, seconds in more.items() if most >= tried)
        tokens = 1 + sum(chances[:tried]) / requests
        loss = costs[0] - seconds / tokens if drafted else seconds - costs[0] * tokens
        what, trials = "none" if drafted else "texts", self.lookup.trials
        if not trials.is_due(what, loss):
            return drafted
        trials.judge(what, won=False, lost=max(0.0, loss))
        return 0 if drafted else tried

    def _chosen(self, rows: list[int], offer: _Offer, lengths: np.ndarray) -> tuple[list[int], int]:
        """Return the rows for which the target drafts, none of them perhaps, and how deep."""
        if self.own is None:
            return [], 0
        room = max(map(self._room, self.lengths))
        self.armed.guess = self.own.guess(self.lengths, self.efforts[-1].depth)
        chosen = self.pace.choose(room, offer.promised, offer.seconds, offer.row_seconds)
        depth = self.armed.choose(room).depth if chosen is not None else 0
        if not depth:
            return [], 0
        ready = self.own.ready(rows, lengths, depth)
        promised = dict(zip(rows, offer.promised, strict=True))
        return [row for row in ready if self.pace.promises(_OWN) >= promised[row]] or ready, depth

    def _draft(
        self, rows: list[int], depth: int, offer: _Offer, lengths: np.ndarray, tokens: np.ndarray
    ) -> dict[int, list[int]]:
        """Return what the target drafts for itself, by row: on every rank what rank 0 chose."""
        self.begun, self.effort = self.lookup, NONE
        if self.own is None:
            return {}
        if not rows:
            self.pace.looked_up()
        kept = self.pace.keeps(_OWN, offer.row_seconds)
        rows, depth, kept = self.own.agreed((rows, depth, kept))
        drafts = self.own.draft(rows, lengths, tokens, depth) if rows else []
        self.own.collect(kept)
        if rows:
            self.begun, self.effort = self.armed, Effort(1, depth)
        return dict(zip(rows, drafts, strict=True))

    def _room(self, length: int) -> int:
        """Return how many tokens may be drafted behind so many."""
        return max(0, self.capacity - length - 1)

    def _new(self) -> _Request:
        return _Request(self.texts.new(), *(self.shared or self._unknown()))

    def _unknown(self) -> tuple[ChainGains, Calibration]:
        """Return what is known of drafts before any was verified."""
        return ChainGains(self.efforts, self.sizes), Calibration(_TRUSTED, _JUDGED)


def _rows(requests: int, drafted: int) -> int:
    """Return the size of a step: the next of `ROWS`."""
    enough = (rows for rows in ROWS if requests * (rows - _ROW) >= _ROW * drafted)
    return next(enough, ROWS[-1])
