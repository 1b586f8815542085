"""vLLM drafters that look up the text's end in the text, and draft what followed it before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from specattn.decoding.drafting.corpus import suffix_index
from specattn.decoding.methods.prompt_lookup import SuffixIndex

from .requests import Requests
from .texts import LONGEST, likeliest_path

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _Index(Protocol):
    """The index of one request's text."""

    def extend(self, tokens: list[int]) -> None: ...

    def continuation(self, length: int) -> list[int]: ...


class _TextDrafter:
    """Drafts for vLLM's ``"method": "custom_class"`` from an index of each request's text.

    At most `num_speculative_tokens` of vLLM's `speculative_config` are drafted.
    """

    def __init__(self, vllm_config: VllmConfig):
        self.config = vllm_config
        self.gamma = vllm_config.speculative_config.num_speculative_tokens
        self.capacity = vllm_config.model_config.max_model_len
        self.requests = Requests(self.index)

    def index(self) -> _Index:
        """Return the index of an empty text."""
        raise NotImplementedError

    def load_model(self, model: Any) -> None:
        """Prepare vLLM; lookups need no model."""
        from .prepare import prepare

        prepare(self.config)

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


class PromptLookup(_TextDrafter):
    """Drafts what `specattn.decoding.PromptLookup` does, at most vLLM's `num_speculative_tokens`.

    The longest suffix of a request's text that occurred before decides, at its latest occurrence;
    it has at most `longest` tokens, which a subclass may set. A lookup costs the same however long
    the text is; the index takes memory in proportion to it.
    """

    longest = LONGEST

    def index(self) -> SuffixIndex:
        """Return the index of an empty text."""
        return SuffixIndex(self.longest)


class Suffix(_TextDrafter):
    """The most probable path of `specattn.decoding.Suffix`, up to `num_speculative_tokens`.

    It ends where it is less probable than `least`: there a row of verification costs more than it
    is likely to bring.
    """

    least = 0.25

    def index(self) -> _Path:
        """Return the index of an empty text."""
        return _Path(self.least)


class _Path:
    def __init__(self, least: float):
        self.least = least
        self.drafter: Any = suffix_index().SuffixDrafter()

    def extend(self, tokens: list[int]) -> None:
        self.drafter.extend(tokens)

    def continuation(self, length: int) -> list[int]:
        # Paths of at least that probability are few: their tree is small.
        return likeliest_path(*self.drafter.draft(8 * length, length, self.least)).tokens
