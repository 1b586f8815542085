"""Prompt lookup as a drafter of vLLM: it copies what followed the last tokens before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specattn.decoding.methods.prompt_lookup import SuffixIndex

from .requests import Requests

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LONGEST = 3
"""Tokens of the longest suffix that is looked up, if vLLM's `prompt_lookup_max` is not given."""


class PromptLookup:
    """What `specattn.decoding.PromptLookup` drafts, for vLLM's ``"method": "custom_class"``.

    The longest suffix of a request's text that occurred before decides, at its latest occurrence.
    A lookup costs the same however long the text is; the index takes memory in proportion to it.

    Parameters
    ----------
    vllm_config : VllmConfig
        Of its `speculative_config`: `num_speculative_tokens`, drafted at most, and
        `prompt_lookup_max`.
    """

    def __init__(self, vllm_config: VllmConfig):
        config = vllm_config.speculative_config
        self.gamma = config.num_speculative_tokens
        longest = config.prompt_lookup_max or LONGEST
        self.capacity = vllm_config.model_config.max_model_len
        self.requests = Requests(lambda: SuffixIndex(longest))

    def load_model(self, model: Any) -> None:
        """Need no model."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each row; none for a row that got no token, or has no room."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        known = self.requests.of_rows(rows, num_tokens_no_spec, token_ids_cpu)
        for row, (index, new) in zip(rows, known, strict=True):
            index.extend(new.tolist())
            room = self.capacity - int(num_tokens_no_spec[row]) - 1
            drafts[row] = index.continuation(max(0, min(self.gamma, room)))
        return drafts
