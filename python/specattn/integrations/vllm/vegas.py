"""Vegas as a drafter of vLLM: the target drafts on the tokens that verification found important.

(*Vegas*, arXiv 2602.07223, section 3; docs/vllm.md)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.config import VllmConfig

from specattn.decoding.drafting.gains import NONE, ChainGains, Effort
from specattn.decoding.drafting.pace import Arm, FixedSize
from specattn.decoding.drafting.timings import Memory
from specattn.decoding.model.model import Model
from specattn.decoding.text.statistics import Clock

from .prepare import prepare
from .self_drafts import SelfDrafts


class Vegas:
    """Self-drafting for vLLM's ``"method": "custom_class"``; a subclass may change its options.

    Drafts are greedy, and vLLM's rejection sampler takes a draft without probabilities for a
    certain one: texts keep the target's distribution at every temperature.

    Parameters
    ----------
    vllm_config : VllmConfig
        Of its `speculative_config`: `num_speculative_tokens`, drafted per round.

    Attributes
    ----------
    ratio : float
        Share of a request's tokens that a draft reads.
    min_tokens : int
        Fewest that it reads.
    switch : bool
        Time steps with and without drafts and keep to the faster kind, for all requests alike: they
        share each step.

    Raises
    ------
    ValueError
        The model is split into stages, or runs in replicas.
    """

    ratio = 0.07
    min_tokens = 256
    switch = True

    def __init__(self, vllm_config: VllmConfig):
        self.config = vllm_config
        self.gamma = vllm_config.speculative_config.num_speculative_tokens
        given = vllm_config, self.gamma, self.ratio, self.min_tokens
        self.drafts = SelfDrafts("Vegas", *given)
        self.lengths: list[int] = []  # of the requests that got a token in the last step
        self.drafted = 0  # requests that had a draft in it
        effort = Effort(1, self.gamma)
        self.arm = FixedSize(effort)
        if self.switch:
            clock = Clock(vllm_config.device_config.device)
            memory = Memory(clock, lambda: self.lengths, Model())
            self.arm = Arm(memory, "vegas", [NONE, effort], [1, self.gamma + 1], ChainGains)

    def load_model(self, model: Any) -> None:
        """Set the target; ValueError where a layer's attention is not ours, or shares a cache."""
        prepare(self.config)
        self.drafts.load_model(model)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each row that gets one, and decide whether the next pass collects.

        A request's first round has no draft: nothing was selected for it yet.
        """
        found: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        effort = self._chosen(rows, sampled_token_ids, num_tokens_no_spec) if rows else NONE
        effort = self.drafts.agreed(effort)
        ready = list[int]()
        if effort != NONE:
            ready = self.drafts.ready(rows, num_tokens_no_spec, self.gamma)
        if ready:
            chains = self.drafts.draft(ready, num_tokens_no_spec, token_ids_cpu, self.gamma)
            for row, chain in zip(ready, chains, strict=True):
                found[row] = chain
        # It is chosen for the draft that is made now, and so for the next collection.
        self.drafts.collect(effort != NONE)
        self.drafted = len(ready)
        if rows and (effort != NONE) == bool(ready):  # or else the step prepares the next draft
            self.arm.begin(effort, 1 + effort.depth)
        return found

    def _chosen(self, rows: list[int], sampled: list[list[int]], lengths: np.ndarray) -> Effort:
        """Learn from the step that has ended; return what is drafted for the next one."""
        self.lengths = [int(lengths[row]) for row in rows]
        # Rows without a draft accepted nothing, so they are among the last.
        counts = sorted((len(sampled[row]) - 1 for row in rows), reverse=True)
        self.arm.learn(self.gamma if self.drafted else 0, counts[: self.drafted])
        return self.arm.choose(self.gamma)
