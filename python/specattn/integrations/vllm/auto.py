"""Auto in vLLM: each request drafts by whatever promises the most tokens per second, or nothing.

A step of vLLM verifies all its requests at once, drafts of any lengths beside each other. What they
may add to a step is chosen for all together, by what steps of so many rows took, and goes to the
likeliest tokens of all requests. (`specattn.decoding.Auto`; docs/vllm.md)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.logger import init_logger

from specattn.decoding.drafting.gains import ChainGains, Effort, chains
from specattn.decoding.drafting.pacer import ASKING
from specattn.decoding.text.statistics import Clock

from .plans import OWN, TEXTS, Plan, choose, from_target, from_texts
from .prepare import prepare
from .requests import Requests
from .self_drafts import SelfDrafts
from .steps import Steps
from .texts import Chain, Text, Texts

_LONGEST_OWN = 6  # tokens that the target drafts for itself at most
_COLD = 3  # steps behind a prompt that take longer, whatever they draft
_logger = init_logger("vllm.specattn")


@dataclass
class _Request:
    """What is known of a request."""

    text: Text
    gains: ChainGains  # of what the target drafts for it
    own: int = 0  # tokens that it drafted in the last step
    steps: int = 0


class Auto:
    """Drafting by whatever is fastest, for vLLM's ``"method": "custom_class"``.

    Before each step every request drafts what followed its text's end before (suffix decoding and
    prompt lookup), what the target drafts for itself (Vegas), or nothing, by the time that steps
    took. vLLM's rejection sampler takes drafts without probabilities for certain ones: texts keep
    the target's distribution at every temperature.

    Parameters
    ----------
    vllm_config : VllmConfig
        Of its `speculative_config`: `num_speculative_tokens`, the longest draft of a request.

    Attributes
    ----------
    vegas : bool
        Whether the target may draft for itself. Where a layer's attention is not ours, or the model
        is split into stages or runs in replicas, it cannot, which is said once.
    ratio, min_tokens
        As for `Vegas`.
    corpus : sequence of path
        Files of UTF-8 that are looked up beside each text.
    cache : path or None
        Folder where indexes of `corpus` are kept for other processes.
    remember : bool
        Whether requests learn from each other: outputs are looked up for later ones, and drafts are
        judged by all. Then the times of a user's tokens tell what others' texts said. By default a
        request knows its own text, and what steps take.

    Raises
    ------
    ValueError
        A file of `corpus` cannot be read.
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
        known = model.get_vocab_size(), str(model.tokenizer), self.most
        self.texts = Texts(*known, corpus=self.corpus, cache=self.cache, remember=self.remember)
        self.depths = np.array([one.depth for one in chains(min(self.most, _LONGEST_OWN))])
        self.requests = Requests(self._new, lambda request: self.texts.ended(request.text))
        self.own: SelfDrafts | None = None
        self.shared: ChainGains | None = None
        self.steps = Steps(Clock(vllm_config.device_config.device))
        self.running: list[_Request] = []  # in the last step
        self.last = dict[str, float]()  # when what seemed to lose was done, by source
        self.saves = 0.0  # seconds, by a lookup of late
        self.idle = 0  # calls in a row that drafted nothing

    def load_model(self, model: Any) -> None:
        """Let the target draft for itself, or say why it cannot."""
        prepare(self.config)
        given = self.config, model, self.most, self.ratio, self.min_tokens
        try:
            self.own = SelfDrafts("Auto", *given) if self.vegas else None
        except ValueError as reason:
            _logger.warning("%s. The target does not draft for itself", reason)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each row, and decide whether the next pass collects."""
        asked, drafts = self.steps.clock.now(), list[list[int]]([] for _ in sampled_token_ids)
        if self._skips():
            return drafts
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        found = self.requests.of_rows(rows, num_tokens_no_spec, token_ids_cpu)
        wrote = [len(sampled_token_ids[row]) for row in rows]
        lengths = num_tokens_no_spec[rows].tolist()
        counts = self._learn(found, wrote) and len(rows) == len(drafts)
        self.steps.end(asked, lengths, counts)
        if not rows:
            if self.own is not None:
                self.own.collect(False)
            return drafts
        offered = [
            self._offered(request.text, new, count, token_ids_cpu[row, :length])
            for (request, new), row, count, length in zip(found, rows, wrote, lengths, strict=True)
        ]
        plans = self._plans([chain.chances for chain in offered], lengths)
        chosen, best = choose(plans, self.last, self.steps.elapsed)
        saved = best.tokens * plans[0].seconds - best.seconds if best.source == TEXTS else 0.0
        self.saves += (saved - self.saves) / 8
        began, own = self.steps.clock.now(), dict[int, list[int]]()
        if self.own is not None:
            wanted = [row for row, target in zip(rows, chosen.own, strict=False) if target]
            given = wanted, num_tokens_no_spec, token_ids_cpu, chosen.depth
            own = self.own.drafted(*given, again=best.source == OWN)
        if chosen.source == OWN and not own:  # nothing was ranked so far
            others = [one for one in plans if one.source != OWN]
            chosen = max(others, key=lambda one: one.rate, default=chosen)
        elif chosen is not best:
            self.last[chosen.source] = self.steps.elapsed
        for row, (request, _), chain, taken in zip(rows, found, offered, chosen.taken, strict=True):
            drafts[row] = own.get(row, chain.tokens[:taken])
            request.own = len(own.get(row, ()))
        self.idle = 0 if any(drafts) else self.idle + 1
        drafted, depth = sum(map(len, drafts)), max(map(len, own.values()), default=0)
        if drafted or self.own is None or not self.own.collects:  # or it ranks for the next draft
            self.steps.begin(drafted, depth, asked, began)
        return drafts

    def _learn(self, found: list[tuple[_Request, Any]], wrote: list[int]) -> bool:
        """Learn from the step that has ended; return whether these went on in it, and are warm."""
        counts, self.running = len(found) == len(self.running), [request for request, _ in found]
        for (request, came), count in zip(found, wrote, strict=True):
            request.steps += 1
            request.gains.learn(request.own, [count - 1])
            # One that begins reads more, even where its text is what another's was that has ended.
            counts = counts and len(came) == count and request.steps > _COLD
        return counts

    def _skips(self) -> bool:
        """Whether nothing is looked up, since that did not pay of late.

        What is written meanwhile is read before the next lookup.
        """
        # The second call in a row says what steps without drafts take.
        skips = self.idle > 1 and self.steps.plain < np.inf
        if self.own is not None:  # ranks would have to agree on it
            skips = skips and not self.own.collects and self.own.ranks == 1
        if skips := skips and self.steps.took > max(self.saves, ASKING / 2 * self.steps.waited):
            self.steps.skip()
        elif self.steps.waited:
            self.idle = 0
        return skips

    def _offered(self, text: Text, new: np.ndarray, wrote: int, whole: np.ndarray) -> Chain:
        """Return what a text offers that has become this one by `new` tokens."""
        text.extend(new.tolist(), wrote)
        return text.chain(whole, max(0, min(self.most, self.capacity - len(whole) - 1)))

    def _plans(self, chances: list[list[float]], lengths: list[int]) -> list[Plan]:
        """Return what the step that begins may draft: nothing first, by the target last."""
        plans = from_texts(self.steps, chances)
        depths = self.depths[self.depths < self.capacity - min(lengths)]
        if self.own is None or not len(depths):
            return plans
        taken = plans[:2][-1].taken
        promised = np.array([sum(path[:n]) for path, n in zip(chances, taken, strict=True)])
        known = np.array([request.gains.probabilities for request in self.running])
        gains = np.cumsum(known, axis=1)[:, depths - 1]
        share = self.own.share(lengths)
        return plans + from_target(self.steps, taken, promised, gains, depths, share)

    def _new(self) -> _Request:
        most = int(self.depths[-1])
        gains = self.shared or ChainGains([Effort(1, most)], [most + 1])
        self.shared = gains if self.remember else None
        return _Request(self.texts.new(), gains)
