"""`ContextualPenalty`: a penalty on the last tokens alone, so that long texts keep their words."""

from __future__ import annotations

import math

import torch
from transformers import LogitsProcessor


class ContextualPenalty(LogitsProcessor):
    """Make tokens less likely that are among the last `window` ones.

    A positive logit is divided by `penalty`, a negative one multiplied, as by transformers'
    repetition penalty, which looks at the whole text: over many thousand tokens that reaches nearly
    every word. (*TokenSwift*, arXiv 2502.18890, section 3.4, equation 3; Keskar et al. 2019.)

    It is a processor like any other, for ``model.generate`` as well. Prompt tokens count.

    Parameters
    ----------
    window : int
        Tokens that are looked at, W in the paper.
    penalty : float
        Theta in the paper; 1 changes nothing, less than 1 encourages repetition.

    Attributes
    ----------
    context_window : int
        What `specattn.decoding.Sampler` shows it: the last `window` tokens, never padding.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """

    def __init__(self, window: int = 1024, penalty: float = 1.2):
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        if not 0 < penalty < math.inf:
            raise ValueError(f"penalty must be a positive number, got {penalty}")
        self.context_window, self.penalty = window, penalty

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return penalised logits [B, V] of the token that follows `input_ids` [B, L]."""
        recent = input_ids[:, -self.context_window :]
        said = scores.gather(1, recent)
        said = torch.where(said < 0, said * self.penalty, said / self.penalty)
        return scores.scatter(1, recent, said)
