"""Vegas as a drafter of vLLM: the target drafts on the tokens that verification found important.

(*Vegas*, arXiv 2602.07223, section 3; docs/vllm.md)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.config import VllmConfig

from .auto import Auto
from .plans import Plan
from .prepare import prepare
from .self_drafts import SelfDrafts
from .texts import Chain


class Vegas(Auto):
    """Self-drafting for vLLM's ``"method": "custom_class"``; a subclass may change its options.

    It is `Auto` that looks up no text and drafts chains of one length. Drafts are greedy, and
    vLLM's rejection sampler takes a draft without probabilities for a certain one: texts keep the
    target's distribution at every temperature.

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
        share each step. Or else draft always.

    Raises
    ------
    ValueError
        The model is split into stages, or runs in replicas.
    """

    switch = True

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self.depths = np.array([self.most])

    def load_model(self, model: Any) -> None:
        """Set the target; ValueError where a layer's attention is not ours, or shares a cache."""
        prepare(self.config)
        self.own = SelfDrafts("Vegas", self.config, model, self.most, self.ratio, self.min_tokens)

    def _offered(self, *_: Any) -> Chain:
        return Chain([], [])

    def _plans(self, chances: list[list[float]], lengths: list[int]) -> list[Plan]:
        plans = super()._plans(chances, lengths)
        return plans if self.switch else plans[-1:]
